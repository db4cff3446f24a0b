"""Is training healthy, what is lost, what waits for a person: read off one snapshot. Pure."""

from __future__ import annotations

from typing import Any

from app.palette import DEGRADED_RUN, PROPOSAL_LOOKS, STATUS_LOOKS, WELL, Look
from app.queries import LiveSnapshot
from app.shapes import is_whole, status_look
from app.words import percent, plural, seconds, split_title
from storage.records import GPU_STATES, RunState

BROKEN = ("failed", "repairing", "draining", "degraded", "suspect")


def answers(snapshot: LiveSnapshot, state: RunState) -> list[dict[str, Any]]:
    """Parts of the verdict component."""
    return [_health(state), _lost(snapshot, state), _waiting(snapshot)]


def goodput_now(state: RunState) -> float | None:
    """Pace of the last steps over the healthy one; None while that is not known."""
    ideal = state.ideal_step_s
    if ideal <= 0 or state.step_s <= 0:
        return None
    return min(1.0, ideal / state.step_s)


def _part(what: str, look: Look, head: str, sub: str) -> dict[str, Any]:
    return {"what": what, "look": look.data(), "head": head, "sub": sub}


def _health(state: RunState) -> dict[str, Any]:
    look, now = status_look(state), goodput_now(state)
    pace = (
        f"{percent(now)} of the healthy pace" if now is not None else "healthy pace not known yet"
    )
    if state.status == "running":
        whole = look is not DEGRADED_RUN
        head = "Training is healthy" if whole else "Training goes on, reduced"
        return _part("Training", WELL if whole else look, head, pace)
    words = {
        "starting": "Starting: no step committed yet",
        "reconfiguring": "Reconfiguring: training pauses for a moment",
        "waiting": "Waiting for a GPU: nothing trains",
        "paused": "Paused: nothing trains, every state is kept",
        "stopped": "The run has ended",
        "failed": "The run has failed",
    }
    return _part("Training", look, words[state.status], state.status_reason or pace)


def _lost(snapshot: LiveSnapshot, state: RunState) -> dict[str, Any]:
    broken: list[str] = []
    for name, record in snapshot.racks.items():
        if any(record.states):
            broken += [
                f"{name}/{slot} {GPU_STATES[code]}"
                for slot, code in enumerate(record.states)
                if GPU_STATES[code] in BROKEN
            ]
    out = [one for one in state.replicas if not is_whole(one)]
    if not broken and not out:
        return _part("Lost", WELL, "Nothing", "every slot of every replica trains")
    left_out = [str(one.replica) for one in out if one.mode != "training"]
    reduced = [str(one.replica) for one in out if one.mode == "training"]
    words = []
    if left_out:
        words.append(f"replica {', '.join(left_out[:4])} left out")
    if reduced:
        words.append(f"replica {', '.join(reduced[:4])} reduced")
    head = plural(len(broken), "GPU") if broken else plural(len(out), "replica")
    return _part("Lost", DEGRADED_RUN, head, "; ".join([*broken[:3], *words]))


def _waiting(snapshot: LiveSnapshot) -> dict[str, Any]:
    waits = [one for one in snapshot.proposals if one.state == "open"]
    if not waits:
        moving = [one for one in snapshot.open_proposals if one.state != "open"]
        if moving:
            look = PROPOSAL_LOOKS[moving[0].state]
            return _part("Waits for you", look, "Nothing", f"a proposal is being {look.word}")
        return _part("Waits for you", WELL, "Nothing", "no proposal is open")
    first = min(waits, key=lambda one: one.expires_at)
    left = max(0.0, first.expires_at - snapshot.updated_at)
    title = split_title(first.options[first.recommended].title)[0]
    head = plural(len(waits), "decision")
    sub = f"{title}; expires in {seconds(left)}"
    return _part("Waits for you", STATUS_LOOKS["waiting"], head, sub)
