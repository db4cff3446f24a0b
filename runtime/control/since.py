"""What a refusal says beside its reason: what changed since the proposal was made. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from storage.records import Proposal, ReplicaState

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator
    from runtime.control.desk import Desk

_MODES = {"training": "trains", "standby": "stands by", "out": "is out"}
_THEN = {"training": "trained", "standby": "stood by", "out": "was out"}


def clock(at: float) -> str:
    """`12:03:04 UTC`."""
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"


def duration(seconds: float) -> str:
    """`42 s`, `11 min`, `3 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def since(desk: Desk, coordinator: Coordinator, proposal: Proposal, now: float) -> str:
    """What changed since `proposal` was made, and what stands in its place."""
    found = []
    if coordinator.plan is not None:
        states = coordinator.progress.replica_states(coordinator.plan)
        found = what_changed(proposal.before, states)
    if coordinator.number != proposal.generation:
        found.append(f"generation {coordinator.number} stands ({coordinator.led_here.cause})")
    age = duration(now - proposal.created_at)
    text = f"Since it was proposed {age} ago: {'; '.join(found) or 'no replica changed'}."
    others = [one.id for one in desk.book.unfinished(proposal.replica) if one.id != proposal.id]
    return f"{text} {others[0]} stands in its place." if others else text


def what_changed(before: Sequence[ReplicaState], after: Sequence[ReplicaState]) -> list[str]:
    """One line for every replica that is not what it was."""
    lines = []
    for old, new in zip(before, after, strict=False):
        parts = []
        if old.mode != new.mode:
            parts.append(f"{_MODES[new.mode]} (it {_THEN[old.mode]})")
        if lost := sorted(set(old.live) - set(new.live)):
            parts.append(f"lost {_slots(lost)}")
        if back := sorted(set(new.live) - set(old.live)):
            parts.append(f"has {_slots(back)} again")
        if parts:
            lines.append(f"replica {new.replica} {' and '.join(parts)}")
    return lines


def _slots(slots: Sequence[int]) -> str:
    return f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"
