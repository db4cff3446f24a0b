"""A run under a fault trace, simulated step by step in no time.

Nothing is modelled twice: steps come from the cost model, choices from the planner (`compare`,
`targets`, `leave_out`), accounting from the ledger; only what a change costs is given, measured.
Pure: the trace is a value, there is no clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from runtime.config import Config
from runtime.layout.takeover import home_holders
from runtime.plan.cost import Calibration
from runtime.plan.ledger import Ledger
from runtime.plan.planner import compare, leave_out, targets
from runtime.plan.situation import Costs, ReplicaSituation, ReplicaTarget, Situation
from storage.records import Bucket

# drop and what follows it keep only whole replicas; torchft also lets the global batch shrink.
SimulatedPolicy = Literal["boost", "shrink", "drop", "restart", "torchft"]


class Outage(NamedTuple):
    """One GPU is dead from `at` until `until`, seconds since the start."""

    at: float
    until: float
    replica: int
    slot: int


class ChangeCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a change takes. detect_s: until a failure is noticed. forced_s: from there until
    steps run again. planned_s: at a step boundary. checkpoint_every: steps; what is since the last
    one is redone (0: nothing but the step at hand)."""

    detect_s: float = 0.0
    forced_s: float = 0.0
    planned_s: float = 0.0
    checkpoint_every: int = 0


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """goodput: committed tokens over the ideal run's. steps: committed, redone ones not counted.
    last_commit_at: the step at hand at the end counts nowhere."""

    goodput: float
    last_commit_at: float
    steps: int
    buckets: dict[Bucket, float]


class _Event(NamedTuple):
    at: float
    fails: bool
    replica: int
    slot: int


def fault_trace(
    config: Config, *, seconds: float, every_s: float, repair_s: float, seed: int
) -> tuple[Outage, ...]:
    """A working GPU fails about every `every_s` (exponential) and is repaired `repair_s` later."""
    draw = random.Random(seed)
    outages: list[Outage] = []
    at = draw.expovariate(1.0 / every_s)
    while at < seconds:
        dead = {(o.replica, o.slot) for o in outages if o.until > at}
        alive = [
            (replica, slot)
            for replica, rack in enumerate(config.cluster.racks)
            for slot in range(rack.gpus)
            if (replica, slot) not in dead
        ]
        if alive:
            outages.append(Outage(at, at + repair_s, *draw.choice(alive)))
        at += draw.expovariate(1.0 / every_s)
    return tuple(outages)


def simulate(
    config: Config,
    outages: Sequence[Outage],
    policy: SimulatedPolicy,
    costs: ChangeCosts,
    *,
    seconds: float,
    calibration: Calibration | None = None,
) -> Simulated:
    """Run `config` through `outages` for `seconds`."""
    run = _Run(config, policy, costs, calibration or Calibration())
    events = [_Event(o.at, True, o.replica, o.slot) for o in outages]
    events += [_Event(o.until, False, o.replica, o.slot) for o in outages]
    run.through(sorted(events), seconds)
    return run.result(seconds)


class _Run:
    """The state of one simulated run; `now` is the last commit or the end of the last change."""

    def __init__(
        self, config: Config, policy: SimulatedPolicy, costs: ChangeCosts, calibration: Calibration
    ) -> None:
        self._policy, self._costs = policy, costs
        # What a choice is worth depends on how long it stands: about until the next failure.
        charged = Costs(reconfigure_s=costs.planned_s, horizon_s=30.0)
        self._situation = Situation(
            config=config,
            replicas=tuple(_whole(config, index) for index in range(len(config.cluster.racks))),
            calibration=calibration,
            costs=charged,
            no_boost="" if policy == "boost" else "boost is off",
        )
        self._samples = tuple(load.num_samples for load in self._situation.model.healthy_loads())
        self._ideal_s = self._situation.model.ideal_step_s
        self._ledger = Ledger(0.0)
        self._now = 0.0
        self._steps = 0
        self._redo = 0
        self._last_commit_at = 0.0
        self._unsettled: set[int] = set()

    def through(self, events: Sequence[_Event], seconds: float) -> None:
        queue = list(events)
        returned: list[_Event] = []
        while self._now < seconds:
            step_s = self._step_s()
            end = self._now + step_s if step_s else math.inf
            if queue and queue[0].at < min(end, seconds):
                event = queue.pop(0)
                if event.fails:
                    self._fail(event)
                else:
                    returned.append(event)
                    if not step_s:
                        self._now = max(self._now, event.at)
                        self._grow(returned)
                continue
            if end > seconds:
                break
            self._commit(end, step_s)
            self._settle()
            if returned:
                self._grow(returned)

    def result(self, seconds: float) -> Simulated:
        tokens_per_s = (
            self._situation.config.train.global_batch
            * self._situation.config.train.seq_len
            / self._ideal_s
        )
        return Simulated(
            goodput=self._ledger.token_goodput(seconds, tokens_per_s),
            last_commit_at=self._last_commit_at,
            steps=self._steps,
            buckets=self._ledger.totals(max(seconds, self._ledger.marked_at)),
        )

    def _step_s(self) -> float:
        """What the next step takes; 0.0 while nothing can train."""
        if not any(self._samples):
            return 0.0
        if self._policy == "torchft":
            return self._ideal_s
        loads = [
            msgspec.structs.replace(self._situation.load(replica), num_samples=count)
            for replica, count in zip(self._situation.replicas, self._samples, strict=True)
        ]
        return self._situation.model.predict(loads).step_s

    def _commit(self, at: float, step_s: float) -> None:
        replicas = self._situation.replicas
        self._now = at
        if self._redo:
            self._redo -= 1
            self._ledger.spend("recomputing", at)
            return
        tokens = self._situation.config.train.global_batch * self._situation.config.train.seq_len
        if self._policy == "torchft":
            tokens = tokens * sum(r.trains for r in replicas) // len(replicas)
        self._steps += 1
        self._last_commit_at = at
        self._ledger.committed(
            at,
            self._ideal_s,
            tokens=tokens,
            step_s=step_s,
            healthy=all(not r.dead and r.trains for r in replicas),
        )

    def _fail(self, event: _Event) -> None:
        subject = self._situation.replicas[event.replica]
        if event.slot in subject.returned:
            self._replace(subject, returned=_less(subject.returned, event.slot))
            return
        trained = subject.trains
        self._replace(subject, live=_less(subject.live, event.slot))
        if not trained and self._policy not in ("boost", "shrink"):
            return
        at = max(event.at, self._now)
        self._ledger.failed(at + self._costs.detect_s, at)
        self._now = at + self._costs.detect_s + self._costs.forced_s
        if self._costs.checkpoint_every:
            self._redo += self._steps % self._costs.checkpoint_every
        others = any(r.trains for r in self._situation.replicas)
        self._adopt(self._unasked())
        if self._policy not in ("boost", "shrink"):
            return
        # As in a run whose policy answers at once: reshaped in the generation that is formed
        # anyway. Where no other replica trains it is left out first.
        self._unsettled.add(event.replica)
        if others:
            self._reshape()

    def _settle(self) -> None:
        """At a step boundary: what could not be done at once."""
        if self._reshape():
            self._ledger.reconfigured(self._now)
            self._now += self._costs.planned_s

    def _reshape(self) -> bool:
        """Do what the planner recommends for broken replicas; whether anything changed."""
        changed = False
        for index in sorted(self._unsettled):
            choice = compare(self._situation, index).choice
            if choice.feasible and choice.kind not in ("carry_on", "drop"):
                self._adopt(targets(self._situation, choice))
                changed = True
        self._unsettled.clear()
        return changed

    def _unasked(self) -> tuple[ReplicaTarget, ...] | None:
        """Whole replicas carry on; None when nothing can train."""
        keeps = self._policy in ("boost", "shrink")
        replicas = self._situation.replicas
        able = any(r.live for r in replicas) if keeps else any(r.trains for r in replicas)
        return leave_out(self._situation) if able else None

    def _grow(self, returned: list[_Event]) -> None:
        """At a step boundary: take back what was repaired, as far as the policy can use it."""
        for event in returned:
            subject = self._situation.replicas[event.replica]
            self._replace(subject, returned=tuple(sorted({*subject.returned, event.slot})))
        changed = False
        for index in sorted({event.replica for event in returned}):
            subject = self._situation.replicas[index]
            if subject.dead and self._policy not in ("boost", "shrink"):
                continue
            grow = compare(self._situation, index, wanted="grow").choice
            if grow.feasible:
                self._adopt(targets(self._situation, grow))
                changed = True
        returned.clear()
        if changed:
            self._ledger.reconfigured(self._now)
            self._now += self._costs.planned_s

    def _adopt(self, wanted: Sequence[ReplicaTarget] | None) -> None:
        if wanted is None:
            self._samples = (0,) * len(self._samples)
            self._ledger.paused(self._now)
            return
        self._samples = tuple(target.num_samples for target in wanted)
        for subject, target in zip(self._situation.replicas, wanted, strict=True):
            self._replace(
                subject,
                mode=target.mode,
                live=target.live,
                holders=target.holders,
                returned=tuple(s for s in subject.returned if s not in target.live),
                caps_w=target.caps_w,
            )

    def _replace(self, subject: ReplicaSituation, **changes: object) -> None:
        replicas = list(self._situation.replicas)
        replicas[subject.replica] = msgspec.structs.replace(subject, **changes)
        self._situation = msgspec.structs.replace(self._situation, replicas=tuple(replicas))


def _whole(config: Config, index: int) -> ReplicaSituation:
    rack = config.cluster.racks[index]
    home = home_holders(config.model, rack.gpus)
    return ReplicaSituation(
        replica=index,
        rack=rack.name,
        mode="training",
        gpus=tuple(f"{rack.name}/{slot}" for slot in range(rack.gpus)),
        home=home,
        holders=home,
        live=tuple(range(rack.gpus)),
        caps_w=(config.emulated.normal_cap_w,) * rack.gpus,
    )


def _less(slots: tuple[int, ...], slot: int) -> tuple[int, ...]:
    return tuple(each for each in slots if each != slot)
