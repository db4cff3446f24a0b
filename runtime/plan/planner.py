"""The planner: compares all options for one replica, recommends one, and says what to do for it.

Pure. It knows the run as it stands, not how it came to that; asking and deciding are the
controller's and the policy's.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from runtime.errors import PlanError
from runtime.layout.units import without
from runtime.plan.memory import largest, misfit
from runtime.plan.options import build
from runtime.plan.situation import ReplicaSituation, ReplicaTarget, Situation
from storage.records import ActionKind, Option

# Gains below this share are within the prediction's error: the simpler option wins.
_TIE = 0.005


class Comparison(NamedTuple):
    """All options for `replica`; options[recommended] is the planner's choice."""

    replica: int
    options: tuple[Option, ...]
    recommended: int

    @property
    def choice(self) -> Option:
        return self.options[self.recommended]


def compare(situation: Situation, replica: int, *, wanted: ActionKind | None = None) -> Comparison:
    """Compare every option for `replica`, with the other replicas as they stand.

    Args:
        wanted: asked for by hand: recommended whatever it is worth. It may be infeasible, with the
            reason; the caller then refuses the request.

    Raises:
        PlanError: no such replica, or a power budget that cannot hold the rack's live GPUs.
    """
    subject = _subject(situation, replica)
    kinds = _kinds(subject)
    if wanted is not None and wanted not in kinds:
        kinds = (*kinds, wanted)
    options = tuple(build(situation, subject, kind) for kind in kinds)
    chosen = kinds.index(wanted) if wanted is not None else _recommend(situation, subject, options)
    return Comparison(replica, options, chosen)


def targets(situation: Situation, option: Option) -> tuple[ReplicaTarget, ...]:
    """What every replica shall be for `option` to hold.

    Raises:
        PlanError: the option is infeasible, or names slots that are no longer there.
    """
    if not option.feasible:
        raise PlanError(f"{option.title!r} cannot be done: {option.reason}")
    return tuple(
        _target(
            situation,
            replica,
            option.shape[replica.replica],
            option.samples[replica.replica],
            option.caps_w,
        )
        for replica in situation.replicas
    )


def leave_out(situation: Situation) -> tuple[ReplicaTarget, ...]:
    """What every replica shall be right after a failure, unasked.

    Replicas that are whole train on and carry the global batch; broken ones stand by. If none is
    left, every replica with live slots takes over its own dead slots and trains, if that fits its
    GPUs: the run never waits for a person.

    Raises:
        PlanError: no replica has a live slot, or none that has fits.
    """
    if not any(replica.live for replica in situation.replicas):
        raise PlanError("no replica has a live slot")
    trains = [replica.trains for replica in situation.replicas]
    if not any(trains):
        obstacles = [_takeover_obstacle(situation, replica) for replica in situation.replicas]
        trains = [not obstacle for obstacle in obstacles]
        if not any(trains):
            raise PlanError(f"no replica can go on: {'; '.join(filter(None, obstacles))}")
    loads = []
    for replica, on in zip(situation.replicas, trains, strict=True):
        load = situation.load(replica)
        if on and not replica.trains:
            holders = situation.layout(replica, replica.live)
            load = msgspec.structs.replace(load, holders=holders)
        loads.append(load)
    shared = situation.model.shared_out(loads, trains)
    return tuple(
        _target(
            situation,
            replica,
            replica.live if on else (),
            load.num_samples,
            dict(zip(replica.gpus, replica.caps_w, strict=True)),
        )
        for replica, load, on in zip(situation.replicas, shared, trains, strict=True)
    )


def _takeover_obstacle(situation: Situation, replica: ReplicaSituation) -> str:
    """Why `replica` cannot go on with its live slots alone, "" if it can."""
    if not replica.live:
        return f"replica {replica.replica} has no live slot"
    holders = situation.layout(replica, replica.live)
    # It may have to carry the whole batch.
    batch = situation.config.train.global_batch
    reason = misfit(
        situation.config, largest(situation.config, holders, replica.live, batch, replica.holders)
    )
    return f"replica {replica.replica} does not fit: {reason}" if reason else ""


def _subject(situation: Situation, replica: int) -> ReplicaSituation:
    if not 0 <= replica < len(situation.replicas):
        last = len(situation.replicas) - 1
        raise PlanError(f"there is no replica {replica}; choose 0 to {last}")
    return situation.replicas[replica]


def _kinds(subject: ReplicaSituation) -> tuple[ActionKind, ...]:
    """What to compare, simplest first."""
    if subject.dead or subject.left_out or subject.slow:
        grow: tuple[ActionKind, ...] = ("grow",) if subject.returned else ()
        return ("carry_on", "shrink", "shrink_boost", *grow, "drop", "replace", "restart")
    return ("carry_on", "grow", "drop")


def _recommend(situation: Situation, subject: ReplicaSituation, options: tuple[Option, ...]) -> int:
    """Most tokens committed over the horizon; within the prediction's error, the fewest watts.

    Falls back to the first option (carry on, infeasible with its reason) when nothing can be done.
    """
    horizon_s = situation.costs.horizon_s
    normal_w = situation.normal_cap_w
    feasible = [index for index, option in enumerate(options) if option.feasible]
    if subject.unfit:
        # What is about to fail is left before it does, whatever it still yields.
        feasible = [i for i in feasible if options[i].kind != "carry_on"] or feasible
    if not feasible:
        return 0
    value = {
        index: options[index].goodput * max(0.0, horizon_s - options[index].cost_s)
        for index in feasible
    }
    good = [index for index in feasible if value[index] >= max(value.values()) * (1.0 - _TIE)]
    return min(
        good, key=lambda index: (sum(w - normal_w for w in options[index].caps_w.values()), index)
    )


def _target(
    situation: Situation,
    replica: ReplicaSituation,
    shape: tuple[int, ...],
    num_samples: int,
    caps_w: dict[str, float],
) -> ReplicaTarget:
    """`replica` training on `shape`, or standing by with its live slots when that is ()."""
    there = frozenset(replica.live) | frozenset(replica.returned)
    if not there.issuperset(shape):
        gone = sorted(set(shape) - there)
        raise PlanError(f"slots {gone} of replica {replica.replica} are dead")
    live = shape or replica.live
    if shape:
        holders = situation.layout(replica, shape)
    else:
        gone = [slot for slot in range(replica.num_slots) if slot not in live]
        holders = without(replica.holders, gone)
    alive = frozenset(live)
    normal_w = situation.normal_cap_w

    def cap(slot: int, gpu: str) -> float:
        # Standing by needs no boost, but a tight budget may have set the cap below the normal one.
        return caps_w.get(gpu, normal_w) if shape else min(normal_w, replica.caps_w[slot])

    return ReplicaTarget(
        replica=replica.replica,
        mode="training" if shape else "standby" if live else "out",
        live=live,
        holders=holders,
        num_samples=num_samples,
        caps_w=tuple(
            cap(slot, gpu) if slot in alive else 0.0 for slot, gpu in enumerate(replica.gpus)
        ),
    )
