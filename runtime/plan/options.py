"""One option of the planner: what a change of one replica would do to the whole run.

Each comes out as an `Option`, feasible or with the reason why not, so that the screen can show them
all. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from runtime.errors import PlanError
from runtime.plan.cost import ReplicaLoad
from runtime.plan.memory import largest, misfit
from runtime.plan.situation import ReplicaSituation, Situation
from runtime.plan.wording import risk, share_of, title
from runtime.power.emulated import sustained_w
from runtime.power.governor import CapPlan, LimitedBy, RackPower, floor_w, plan_caps
from runtime.power.port import PowerLimits
from storage.records import ActionKind, Option

_LIMITS: dict[LimitedBy, str] = {
    "": "",
    "budget": ", limited by the rack's power budget",
    "device": ", limited by the GPUs' highest cap",
}


_NO_BOOST: dict[LimitedBy, str] = {
    "": "its pace needs no boost",
    "budget": "the rack's power budget leaves nothing for a boost",
    "device": "the normal cap is the highest the GPUs take",
}
_SAME_PACE = 1e-6
_RESHAPES: tuple[ActionKind, ...] = ("grow", "shrink", "shrink_boost", "replace")


class _Change(NamedTuple):
    """What an option does: the slots of its replica that train (() leaves it out), and by replica
    the loads that differ from now."""

    kind: ActionKind
    title: str
    risk: str
    shape: tuple[int, ...]
    loads: Mapping[int, ReplicaLoad]
    cost_s: float


def build(situation: Situation, subject: ReplicaSituation, kind: ActionKind) -> Option:
    """The option of `kind` for replica `subject`; infeasible ones say why in `reason`.

    Slow slots stay or go, whichever promises more."""
    if not subject.slow or kind not in _RESHAPES:
        return _build(situation, subject, kind)
    kept, left = (
        _build(*_instead(situation, subject, other), kind)
        for other in (subject.keeping_slow, subject.leaving_slow)
    )
    if not kept.feasible or (left.feasible and left.goodput > kept.goodput):
        return left
    slots = ", ".join(map(str, subject.slow))
    return msgspec.structs.replace(kept, risk=f"{kept.risk} Slot {slots} is slow and stays.")


def _build(situation: Situation, subject: ReplicaSituation, kind: ActionKind) -> Option:
    reason = ""
    if subject.left_out and kind in _RESHAPES:
        reason = _nobody_else(situation, subject)
        if kind != "grow":
            situation, subject = _instead(situation, subject, subject.drained)
    reason = reason or _obstacle(situation, subject, kind)
    if reason:
        return _infeasible(situation, subject, kind, reason)
    if kind == "carry_on":
        return _predicted(situation, subject, _carry_on(situation, subject))
    if kind == "drop":
        return _predicted(situation, subject, _drop(situation, subject))
    if kind == "shrink_boost":
        return _shrink_boost(situation, subject)
    heading, danger = title(subject, kind), risk(situation, subject, kind)
    if kind == "replace":
        situation, subject = _instead(situation, subject, subject.replaced)
    slots = subject.live if kind == "shrink" else subject.usable
    load = _reshaped(situation, subject, slots)
    change = _Change(
        kind,
        heading,
        danger,
        slots,
        {subject.replica: load},
        situation.costs.restart_s if kind == "restart" else situation.costs.reconfigure_s,
    )
    option = _predicted(situation, subject, change)
    return msgspec.structs.replace(option, gpus=subject.gpus) if kind == "replace" else option


def _instead(
    situation: Situation, subject: ReplicaSituation, other: ReplicaSituation
) -> tuple[Situation, ReplicaSituation]:
    """Both with `other` in the subject's place: drained, for a planned drain shrinks before slots
    are dead, or with spares in dead slots' places."""
    replicas = tuple(other if each is subject else each for each in situation.replicas)
    return msgspec.structs.replace(situation, replicas=replicas), other


# what stands in the way ------------------------------------------------------------------------


def _obstacle(situation: Situation, subject: ReplicaSituation, kind: ActionKind) -> str:
    """Why `kind` cannot be done, "" if it can."""
    if kind in ("carry_on", "drop"):
        others_train = any(r.trains for r in situation.replicas if r.replica != subject.replica)
        if others_train or (kind == "carry_on" and subject.trains):
            return ""
        return "no other replica trains: the run would stop"
    if not subject.usable:
        return f"replica {subject.replica} has no live slot"
    if kind in ("replace", "restart"):
        return situation.no_restart if kind == "restart" else _no_spare(situation, subject)
    if kind == "grow":
        rejoins = not subject.trains and not subject.dead
        possible = subject.returned or rejoins
        return "" if possible else f"no GPU of replica {subject.replica} has come back"
    return _shrink_obstacle(situation, subject, kind)


def _no_spare(situation: Situation, subject: ReplicaSituation) -> str:
    """Why no spare can take a place, "" if one can."""
    if not situation.rack(subject).spares:
        return "no spare configured"
    if not subject.dead:
        return f"replica {subject.replica} has no dead slot"
    return "" if subject.spares else "no spare is left"


def _nobody_else(situation: Situation, subject: ReplicaSituation) -> str:
    """Why the slots to be left out cannot go: nobody else has what they hold."""
    if any(r.trains for r in situation.replicas if r is not subject):
        return ""
    slots = ", ".join(map(str, subject.left_out))
    return f"no other replica trains: what slot {slots} alone holds would be lost"


def _shrink_obstacle(situation: Situation, subject: ReplicaSituation, kind: ActionKind) -> str:
    name = f"replica {subject.replica}"
    if not subject.live:
        return f"no live slot of {name} holds its state; let it grow instead"
    if not subject.dead:
        return f"{name} has no dead slot"
    boosted = any(cap_w > situation.normal_cap_w for cap_w in subject.caps_w)
    if kind == "shrink_boost" and situation.no_boost:
        return situation.no_boost
    if kind == "shrink" and subject.trains and not boosted:
        return f"{name} already trains with {share_of(subject, subject.live)}"
    return ""


def _infeasible(
    situation: Situation, subject: ReplicaSituation, kind: ActionKind, reason: str
) -> Option:
    return Option(
        kind=kind,
        title=title(subject, kind),
        shape=tuple(replica.shape for replica in situation.replicas),
        samples=(0,) * len(situation.replicas),
        step_s=0.0,
        tokens_per_s=0.0,
        goodput=0.0,
        cost_s=situation.costs.restart_s if kind == "restart" else 0.0,
        risk="",
        feasible=False,
        reason=reason,
    )


# the changes -----------------------------------------------------------------------------------


def _carry_on(situation: Situation, subject: ReplicaSituation) -> _Change:
    return _Change(
        "carry_on",
        title(subject, "carry_on"),
        risk(situation, subject, "carry_on"),
        subject.shape,
        {},
        0.0,
    )


def _drop(situation: Situation, subject: ReplicaSituation) -> _Change:
    cost_s = situation.costs.reconfigure_s if subject.trains else 0.0
    return _Change(
        "drop",
        title(subject, "drop"),
        risk(situation, subject, "drop"),
        (),
        {},
        cost_s,
    )


def _shrink_boost(situation: Situation, subject: ReplicaSituation) -> Option:
    """Shrink, and boost all reduced replicas together, as far as the batch split can use it.

    Each reduced replica alone may bring nothing while another one holds the step up, so the caps of
    those that train already are planned anew with it.
    """
    others = [r for r in situation.replicas if r.trains and r.dead and r is not subject]
    loads = {other.replica: situation.load(other) for other in others}
    loads[subject.replica] = _reshaped(situation, subject, subject.live)
    reduced = [subject, *others]
    try:
        full = {r.replica: _plan_caps(situation, r, loads[r.replica], 1.0) for r in reduced}
    except PlanError as error:
        return _infeasible(situation, subject, "shrink_boost", str(error))
    plans = _trimmed(situation, subject, loads, full)
    reason = _useless(situation, subject, full, plans)
    if not reason and all(r.trains and plans[r.replica].caps_w == _live_caps(r) for r in reduced):
        reason = f"replica {subject.replica} already trains with this boost"
    if reason:
        return _infeasible(situation, subject, "shrink_boost", reason)
    heading, danger = _boost_words(situation, subject, full, plans)
    boosted = {index: _with_caps(loads[index], plan) for index, plan in plans.items()}
    cost_s = situation.costs.reconfigure_s
    change = _Change("shrink_boost", heading, danger, subject.live, boosted, cost_s)
    return _predicted(situation, subject, change)


def _trimmed(
    situation: Situation,
    subject: ReplicaSituation,
    loads: Mapping[int, ReplicaLoad],
    full: Mapping[int, CapPlan],
) -> dict[int, CapPlan]:
    """`full` without the boost that does not shorten the step of its own batch split."""
    model = situation.model
    boosted = {index: _with_caps(loads[index], plan) for index, plan in full.items()}
    shared = _shared_out(situation, subject, boosted, trains=True)
    step_s = max(load.num_samples * model.sample_s(load) for load in shared if load.num_samples)
    if step_s <= 0.0:
        return dict(full)
    plans = {}
    for index, plan in full.items():
        share = shared[index].num_samples / model.healthy_samples
        in_use = share * model.base_step_s / step_s
        plans[index] = plan
        if in_use < plan.pace - _SAME_PACE:
            plans[index] = _plan_caps(situation, situation.replicas[index], loads[index], in_use)
    return plans


def _useless(
    situation: Situation,
    subject: ReplicaSituation,
    full: Mapping[int, CapPlan],
    plans: Mapping[int, CapPlan],
) -> str:
    """Why no boost comes of it, "" if one does."""
    if any(_boosted(situation, plan) for plan in plans.values()):
        return ""
    if _boosted(situation, full[subject.replica]):
        return "whole samples leave no gain: the step is as long without it"
    return _NO_BOOST[full[subject.replica].limited_by]


def _boost_words(
    situation: Situation,
    subject: ReplicaSituation,
    full: Mapping[int, CapPlan],
    plans: Mapping[int, CapPlan],
) -> tuple[str, str]:
    """Title and risk of a boost."""
    mine = plans[subject.replica]
    limit = _LIMITS[mine.limited_by]
    if mine.pace < full[subject.replica].pace - _SAME_PACE:
        limit = ", all that whole samples use"
    also = sorted(i for i, plan in plans.items() if plan is not mine and _boosted(situation, plan))
    with_others = f", with replica {', '.join(map(str, also))}" if also else ""
    top_w = max(max(plan.caps_w) for plan in plans.values())
    heading = (
        f"{title(subject, 'shrink')} and boost up to {top_w:.0f} W{with_others}: "
        f"{mine.pace:.2f} of the healthy pace{limit}"
    )
    num = sum(w > situation.normal_cap_w for plan in plans.values() for w in plan.caps_w)
    most_w = max(plan.sum_w for plan in plans.values())
    danger = (
        f"{risk(situation, subject, 'shrink')} {num} GPUs run above their normal cap; "
        f"a rack draws up to {most_w:.0f} W."
    )
    return heading, danger


def _with_caps(load: ReplicaLoad, plan: CapPlan) -> ReplicaLoad:
    return msgspec.structs.replace(load, caps_w=plan.caps_w)


def _live_caps(subject: ReplicaSituation) -> tuple[float, ...]:
    alive = frozenset(subject.live)
    return tuple(cap_w if slot in alive else 0.0 for slot, cap_w in enumerate(subject.caps_w))


def _plan_caps(
    situation: Situation, subject: ReplicaSituation, load: ReplicaLoad, target_pace: float
) -> CapPlan:
    return plan_caps(_rack_power(situation, subject, load), target_pace)


def _rack_power(situation: Situation, subject: ReplicaSituation, load: ReplicaLoad) -> RackPower:
    emulated = situation.config.emulated
    return RackPower(
        loads=situation.model.loads_by_slot(load),
        live=load.live,
        limits=PowerLimits(
            min_w=emulated.min_cap_w, normal_w=emulated.normal_cap_w, max_w=sustained_w(emulated)
        ),
        budget_w=situation.rack(subject).power_budget_w,
        dead_slot_w=situation.dead_slot_w,
        curve=situation.config.power.curve,
    )


def _boosted(situation: Situation, plan: CapPlan) -> bool:
    return any(cap_w > situation.normal_cap_w for cap_w in plan.caps_w)


# prediction ------------------------------------------------------------------------------------


def _shared_out(
    situation: Situation,
    subject: ReplicaSituation,
    changed: Mapping[int, ReplicaLoad],
    *,
    trains: bool,
) -> list[ReplicaLoad]:
    """Loads of all replicas with the batch shared out; those not `changed` stay as they are."""
    loads, on = [], []
    for replica in situation.replicas:
        loads.append(changed.get(replica.replica) or situation.load(replica))
        on.append(trains if replica is subject else replica.trains)
    return situation.model.shared_out(loads, on)


def _predicted(situation: Situation, subject: ReplicaSituation, change: _Change) -> Option:
    loads = _shared_out(situation, subject, change.loads, trains=bool(change.shape))
    if reason := _misfit(situation, change, loads):
        return _infeasible(situation, subject, change.kind, reason)
    step = situation.model.predict(loads)
    shape = tuple(
        change.shape if replica.replica == subject.replica else replica.shape
        for replica in situation.replicas
    )
    caps_w = {
        replica.gpus[slot]: load.caps_w[slot]
        for replica, load, slots in zip(situation.replicas, loads, shape, strict=True)
        for slot in slots
        if load.caps_w[slot] != situation.normal_cap_w
    }
    return Option(
        kind=change.kind,
        title=change.title,
        shape=shape,
        samples=tuple(load.num_samples for load in loads),
        step_s=step.step_s,
        tokens_per_s=step.tokens_per_s,
        goodput=step.goodput,
        cost_s=change.cost_s,
        risk=change.risk,
        caps_w=caps_w,
    )


def _misfit(situation: Situation, change: _Change, loads: Sequence[ReplicaLoad]) -> str:
    """Why what `change` makes of a replica does not fit its GPUs, "" if it does."""
    for index in sorted(change.loads):
        load, now = loads[index], situation.replicas[index]
        need = largest(situation.config, load.holders, load.live, load.num_samples, now.holders)
        if reason := misfit(situation.config, need):
            return f"replica {index} does not fit: {reason}"
    return ""


def _reshaped(
    situation: Situation, subject: ReplicaSituation, slots: tuple[int, ...]
) -> ReplicaLoad:
    """`subject` training on `slots` without boost."""
    holders = situation.layout(subject, slots)
    alive = frozenset(slots)
    load = msgspec.structs.replace(situation.load(subject), holders=holders, live=slots)
    cap_w = floor_w(_rack_power(situation, subject, load))
    caps_w = tuple(cap_w if slot in alive else 0.0 for slot in range(subject.num_slots))
    return msgspec.structs.replace(load, caps_w=caps_w)
