"""The words of an option: its title and its risk, short and in the glossary's terms. Pure."""

from __future__ import annotations

from runtime.plan.situation import ReplicaSituation, Situation
from storage.records import ActionKind


def share_of(subject: ReplicaSituation, slots: tuple[int, ...]) -> str:
    return f"{len(slots)} of {subject.num_slots} slots"


def title(subject: ReplicaSituation, kind: ActionKind) -> str:
    name = f"replica {subject.replica}"
    usable = subject.usable
    if kind == "carry_on":
        if not subject.trains:
            return f"Carry on without {name}"
        return f"Carry on with {name} at {share_of(subject, subject.live)}"
    if kind == "grow":
        if not subject.trains:
            return f"Let {name} rejoin with {share_of(subject, usable)}"
        return f"Grow {name} to {share_of(subject, usable)}"
    smaller = f" to {share_of(subject, subject.live)}" if subject.dead else ""
    return {
        "drop": f"Drop {name} until it is repaired",
        "shrink": f"Shrink {name}{smaller}",
        "shrink_boost": f"Shrink {name}{smaller} and boost",
        "replace": _replacement(subject),
        "restart": "Restart all processes from a fresh checkpoint",
    }[kind]


def _replacement(subject: ReplicaSituation) -> str:
    pairs = list(zip(subject.dead, subject.spares, strict=False))
    slots = ", ".join(str(slot) for slot, _ in pairs)
    spares = ", ".join(spare for _, spare in pairs)
    if not pairs:
        return f"Replace a dead slot of replica {subject.replica} by a spare"
    left = (
        f"; {share_of(subject, subject.replaced.usable)}" if len(pairs) < len(subject.dead) else ""
    )
    return f"Put {spares} into slot {slots} of replica {subject.replica}{left}"


def risk(situation: Situation, subject: ReplicaSituation, kind: ActionKind) -> str:
    """What may go wrong or be lost, in plain words."""
    training = sum(1 for replica in situation.replicas if replica.trains and replica is not subject)
    if subject.unfit and kind == "carry_on":
        named = ", ".join(map(str, subject.left_out))
        return f"High: slot {named} is about to fail or has to be reset."
    if kind == "carry_on" and subject.trains:
        return "None: nothing changes."
    if kind in ("carry_on", "drop"):
        if training == 1:
            return "Only one replica trains: if it fails as well, the run stops or shrinks at once."
        return f"{training} replicas carry the whole batch; each further failure weighs more."
    slots = subject.live if kind == "shrink" else subject.usable
    if kind == "restart":
        words = "High: nothing trains meanwhile, and every process has to come up again."
    elif kind == "replace":
        words = "Low: the spare has not trained in this run; until a repair there is one less."
    elif len(slots) == subject.num_slots:
        words = "Low: the returned GPU has not trained since; it may fail again."
    else:
        words = _crowding(subject, slots)
    return words


def _crowding(subject: ReplicaSituation, slots: tuple[int, ...]) -> str:
    more = subject.num_slots / len(slots) - 1.0
    return f"Low: each live GPU holds {more:.0%} more state; a further dead slot adds to that."
