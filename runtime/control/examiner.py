"""Health in the running system: observations and step times in, verdicts, events and orders out.

It feeds the verdict book and the fail-slow detector and tells the desk which slots are better left
out though their workers live. What to do about them is the planner's and the desk's. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from runtime.config import Config
from runtime.control import messages as m
from runtime.control.instructions import Order, Outgoing, Record, event_of
from runtime.health.fail_slow import Slow, SlowDetector
from runtime.health.observation import BADNESS, Observation, normal_pci, severity_of
from runtime.health.verdict import GpuHealth, Verdict, VerdictBook
from runtime.plan.cost import CostModel, ReplicaLoad
from runtime.plan.generation import GenerationPlan, ReplicaPlan
from storage.commands import Report
from storage.records import EventHappened, GpuState, Severity

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator

KEPT_IDS = 4096
# After a restart, who was slow must show it again within so many steps.
RECHECK_STEPS = 20
_KINDS: dict[GpuState, str] = {
    "healthy": "gpu_cleared",
    "suspect": "gpu_suspect",
    "degraded": "gpu_degraded",
    "draining": "gpu_draining",
    "failed": "gpu_condemned",
    "repairing": "gpu_repairing",
}


class LeftOut(NamedTuple):
    """Slots of a replica that are better left out though they live. unfit: carrying on with them is
    no choice. slow: leaving them out is one option among others."""

    unfit: tuple[int, ...]
    slow: tuple[int, ...]

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(sorted((*self.unfit, *self.slow)))


class ExaminerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a restarted examiner must know. slow: GPU -> ratio. seen: ids of what agents told,
    newest last: they tell it again. sources: host and source -> its state."""

    gpus: dict[str, GpuHealth] = {}
    slow: dict[str, float] = {}
    seen: tuple[str, ...] = ()
    sources: dict[str, tuple[str, str]] = {}


class Examiner:
    """Keeps the verdicts of one run's GPUs."""

    def __init__(self, config: Config, *, run: str, outgoing: Outgoing) -> None:
        self._config = config
        self._run = run
        self._outgoing = outgoing
        self._book = VerdictBook(config.health.verdict)
        allowance = 1.0 + (config.health.slow_ratio - 1.0) / 2
        self._detector = SlowDetector(allowance=allowance)
        self._slow: dict[str, float] = {}
        self._slow_replicas: set[int] = set()
        self._all_slow = False
        self._weights: dict[int, dict[str, float]] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._sources: dict[str, tuple[str, str]] = {}
        self._recalled: set[str] = set()
        self._recheck_in = 0

    def memory(self) -> ExaminerMemory:
        """What to write down."""
        return ExaminerMemory(
            gpus=self._book.memory(),
            slow=dict(self._slow),
            seen=tuple(self._seen),
            sources=dict(self._sources),
        )

    def recall(self, memory: ExaminerMemory) -> None:
        """Go on with what an earlier examiner knew."""
        self._book.recall(memory.gpus)
        self._slow = dict(memory.slow)
        self._seen = OrderedDict.fromkeys(memory.seen)
        self._sources = dict(memory.sources)
        self._recalled, self._recheck_in = set(memory.slow), RECHECK_STEPS

    # what others ask -------------------------------------------------------------------------

    def verdict(self, gpu: str) -> Verdict:
        return self._book.verdict(gpu)

    def slowness(self, gpu: str) -> float:
        """How many times its usual share a GPU takes, as measured; 1.0 when it is not slow."""
        return self._slow.get(gpu, 1.0)

    def slow_in(self, plan: ReplicaPlan) -> str:
        """What is slow of a replica, itself or live slots of it; "" when nothing is."""
        gpus = [plan.gpus[slot] for slot in plan.live if plan.gpus[slot] in self._slow]
        if gpus:
            return f"{', '.join(gpus)} slow"
        return f"{plan.rack} slow" if plan.replica in self._slow_replicas else ""

    def left_out(self, gpus: Sequence[str]) -> LeftOut:
        """Which of a replica's GPUs (by slot) are better left out."""
        unfit = tuple(
            slot
            for slot, gpu in enumerate(gpus)
            if BADNESS[self._book.verdict(gpu).state] >= BADNESS["draining"]
        )
        slow = (slot for slot, gpu in enumerate(gpus) if gpu in self._slow and slot not in unfit)
        return LeftOut(unfit, tuple(slow))

    # events ----------------------------------------------------------------------------------

    def heard(
        self, coordinator: Coordinator, told: m.Observed | m.SourceChanged, now: float
    ) -> None:
        """Take what an agent tells of its sources; what it tells again counts once."""
        if isinstance(told, m.Observed):
            self._observed(coordinator, told, now)
        else:
            self._source_changed(coordinator, told, now)

    def _observed(self, coordinator: Coordinator, told: m.Observed, now: float) -> None:
        if told.id in self._seen:
            return
        self._seen[told.id] = None
        if len(self._seen) > KEPT_IDS:
            self._seen.popitem(last=False)
        seen = told.observation
        if seen.gpu is None or seen.gpu not in coordinator.fleet:
            racks = self._racks_of_switch(told)
            if len(racks) == 1:
                self._switch(coordinator, seen, racks[0], now)
            elif seen.severity != "info":
                where = seen.pci or "an unknown place"
                text = f"{told.host}: {seen.source} reports {seen.code} at {where}: {seen.text}"
                if racks:
                    fix = f'[health.switches] "{seen.pci}" = "{self._rack(racks[0])}"'
                    text += f"; say which rack it is of, for example {fix}"
                severity = seen.severity if racks else "warning"
                self._event(coordinator, "health_unplaced", severity, text, now)
            return
        changed = self._book.observe(seen, now)
        if seen.code is not None and not changed:
            evidence = self._book.verdict(seen.gpu).evidence
            text = f"{seen.gpu}: {evidence[-1][1] if evidence else seen.text}"
            self._event(coordinator, "gpu_observed", seen.severity, text, now, seen.gpu)
        self._apply(coordinator, changed, now)

    def _source_changed(self, coordinator: Coordinator, told: m.SourceChanged, now: float) -> None:
        """Tell of a health source of a host that watches, or does not."""
        key, state = f"{told.host} {told.source}", (told.status, told.reason)
        if self._sources.get(key) == state:
            return
        self._sources[key] = state
        words = f"is {told.status}" + (f": {told.reason}" if told.reason else "")
        entry = EventHappened(
            seq=0, at=now, run=self._run, kind="health_source",
            severity="info" if told.status == "watching" else "warning",
            message=f"{told.host}: health source {told.source} {words}",
            generation=coordinator.number,
            details={
                "host": told.host, "source": told.source, "status": told.status,
                "reason": told.reason,
            },
        )  # fmt: skip
        self._outgoing.put(Record(entry=entry))

    def report(self, coordinator: Coordinator, report: Report, now: float) -> str:
        """Take what a person knows; returns what came of it."""
        if report.state == "healthy":
            self._slow.pop(report.gpu, None)
            changed = self._book.pardon(report.gpu, now)
        else:
            seen = Observation(
                source="report",
                gpu=report.gpu,
                code=report.state,
                severity=severity_of(report.state),
                verdict=report.state,
                text=f"{report.reason} ({report.who})",
                snapshot=True,
            )
            changed = self._book.observe(seen, now)
        self._apply(coordinator, changed, now)
        return f"{report.gpu} is {self._book.verdict(report.gpu).state}: {report.reason}"

    def worker_lost(self, coordinator: Coordinator, gpu: str, why: str, now: float) -> None:
        """Its worker is gone; the coordinator tells of that itself."""
        self._slow.pop(gpu, None)
        seen = Observation(
            source="worker", gpu=gpu, code="exited", verdict="failed", severity="critical", text=why
        )
        self._tell_agents(coordinator, self._book.observe(seen, now))

    def worker_back(self, coordinator: Coordinator, gpu: str, now: float) -> None:
        """A fresh worker is up on it: it was repaired."""
        self._slow.pop(gpu, None)
        changed = self._book.repaired(gpu, now)
        self._tell_agents(coordinator, changed)

    def repair_began(self, coordinator: Coordinator, gpu: str, now: float) -> None:
        self._tell_agents(coordinator, self._book.repair_began(gpu, now))

    def forgiven(self, coordinator: Coordinator, gpu: str, now: float) -> None:
        """A GPU whose worker lives was repaired."""
        self._slow.pop(gpu, None)
        self._detector.forget(gpu)
        self._apply(coordinator, self._book.repaired(gpu, now), now)

    def hello(self, coordinator: Coordinator, host: str) -> None:
        """An agent came (back): tell it what is not healthy."""
        states = {
            verdict.gpu: verdict.state
            for verdict in self._book.bad()
            if verdict.gpu in coordinator.fleet and coordinator.fleet[verdict.gpu].host == host
        }
        if states:
            self._outgoing.put(Order(message=m.SetVerdicts(states=states), host=host))

    def tick(self, coordinator: Coordinator, now: float) -> None:
        self._apply(coordinator, self._book.tick(now), now)

    # switches --------------------------------------------------------------------------------

    def _rack(self, replica: int) -> str:
        return self._config.cluster.racks[replica].name

    def _racks_of_switch(self, told: m.Observed) -> list[int]:
        """Replicas whose rack an NVSwitch's error may be of: the pinned one, else its host's."""
        seen = told.observation
        if not seen.is_sxid:
            return []
        pins = {normal_pci(at): rack for at, rack in self._config.health.switches.items()}
        racks = list(enumerate(self._config.cluster.racks))
        pinned = [number for number, rack in racks if rack.name == pins.get(seen.pci)]
        return pinned or [number for number, rack in racks if rack.host == told.host]

    def _switch(
        self, coordinator: Coordinator, seen: Observation, replica: int, now: float
    ) -> None:
        """Take an NVSwitch's error. A fatal one speaks against every GPU of the rack: NVIDIA has
        all of them reset together with the switches, whichever link it was."""
        gpus = [view.gpu for view in coordinator.fleet if view.replica == replica]
        is_fatal = BADNESS[seen.verdict] >= BADNESS["draining"]
        changed: list[Verdict] = []
        for gpu in gpus if is_fatal else ():
            changed += self._book.observe(msgspec.structs.replace(seen, gpu=gpu), now)
        rack = self._rack(replica)
        text = f"{rack}: SXid {seen.code} ({seen.subcode}): {seen.text}"
        if changed:
            text = f"{rack}: a switch failed, none of its {len(gpus)} GPUs is fit; {text}"
            coordinator.desk.note(replica, now, text)
        entry = EventHappened(
            seq=0, at=now, run=self._run, kind="switch_failed" if changed else "switch_observed",
            severity=seen.severity, message=text, generation=coordinator.number,
            replica=replica, rack=rack, details={
                "action": seen.action, "pci": seen.pci, "gpus": [each.gpu for each in changed],
            },
        )  # fmt: skip
        self._outgoing.put(Record(entry=entry))
        if changed:
            self._tell_agents(coordinator, changed)
            coordinator.desk.refresh(coordinator, now)

    # fail-slow -------------------------------------------------------------------------------

    def generation_published(self, plan: GenerationPlan) -> None:
        """Shares differ from now on."""
        model = CostModel(config=self._config)
        self._weights = {
            replica.replica: _weights(model, replica)
            for replica in plan.replicas
            if replica.mode == "training"
        }
        groups = {gpu: replica for replica, gpus in self._weights.items() for gpu in gpus}
        self._detector.reconfigured(groups)

    def step_committed(
        self, coordinator: Coordinator, plan: GenerationPlan, done: m.StepDone, now: float
    ) -> None:
        """Hold every slot's share of the step against its peers'."""
        emulated = self._config.cluster.device == "emulated"
        if emulated and self._config.emulated.step_s == 0.0:
            return  # There is no device whose pace it could be.
        weights = {gpu: w for gpus in self._weights.values() for gpu, w in gpus.items()}
        durations = {
            gpu: share_s / weights[gpu]
            for gpu, share_s in zip(plan.members(), done.share_s, strict=False)
            if weights.get(gpu, 0.0) > 0.0
        }
        self._detector.take(done.at, durations)
        finished, self._detector.finished = self._detector.finished, []
        changed: list[Verdict] = []
        for slow in finished:
            if self._slow.pop(slow.worker, None) is not None:
                changed += self._book.withdraw(slow.worker, "step_times", "fail_slow", now)
        current = self._detector.slow()
        for slow in current:
            if slow.kind == "slot" and slow.worker in coordinator.fleet:
                changed += self._is_slow(slow, now)
        changed += self._recheck({slow.worker for slow in current}, durations, now)
        self._tell_slow_replicas(coordinator, current, now)
        self._tell_all_slow(coordinator, current, now)
        self._apply(coordinator, changed, now)

    def _recheck(self, slow: set[str], measured: Collection[str], now: float) -> list[Verdict]:
        """Take back what an earlier examiner found slow and this one does not."""
        self._recheck_in -= 1
        if not self._recalled or self._recheck_in > 0:
            return []
        well = {gpu for gpu in self._recalled if gpu in measured} - slow
        self._recalled = set()
        changed: list[Verdict] = []
        for gpu in sorted(well):
            if self._slow.pop(gpu, None) is not None:
                changed += self._book.withdraw(gpu, "step_times", "fail_slow", now)
        return changed

    def _is_slow(self, slow: Slow, now: float) -> list[Verdict]:
        if slow.ratio < self._config.health.slow_ratio:
            return []
        self._slow[slow.worker] = round(slow.ratio, 2)
        seen = Observation(
            source="step_times",
            gpu=slow.worker,
            code="fail_slow",
            severity="warning",
            verdict="degraded",
            text=f"its share of a step takes {slow.ratio:.2f} times that of its peers",
            snapshot=True,
        )
        return self._book.observe(seen, now)

    def _tell_slow_replicas(
        self, coordinator: Coordinator, current: Sequence[Slow], now: float
    ) -> None:
        """A whole replica that is slow has a cause of its own: host, power, network."""
        ratios: dict[int, list[float]] = {}
        for slow in current:
            if slow.kind == "replica" and slow.worker in coordinator.fleet:
                replica = coordinator.fleet[slow.worker].replica
                ratios.setdefault(replica, []).append(slow.ratio)
        for replica, found in ratios.items():
            if replica not in self._slow_replicas:
                text = f"replica {replica} takes {max(found):.2f} times as long as the others"
                self._event(coordinator, "replica_slow", "warning", text, now)
        self._slow_replicas = set(ratios)

    def _tell_all_slow(self, coordinator: Coordinator, current: Sequence[Slow], now: float) -> None:
        """What slows everybody at once is no GPU's fault: nothing is held against one."""
        found = [slow for slow in current if slow.kind == "global"]
        if found and not self._all_slow:
            text = (
                f"all slots take {found[0].ratio:.2f} times what they took before: look at the "
                "input pipeline, the network between racks and the hosts; no GPU is to blame"
            )
            self._event(coordinator, "run_slow", "warning", text, now)
        elif self._all_slow and not found:
            self._event(coordinator, "run_recovered", "info", "the slots' pace is back", now)
        self._all_slow = bool(found)

    # telling ---------------------------------------------------------------------------------

    def _apply(self, coordinator: Coordinator, changed: Sequence[Verdict], now: float) -> None:
        """Tell of new verdicts and let the desk look whether something is to be proposed."""
        for verdict in changed:
            self._tell(coordinator, verdict, now)
        if changed:
            self._tell_agents(coordinator, changed)
            coordinator.desk.refresh(coordinator, now)

    def _tell(self, coordinator: Coordinator, verdict: Verdict, now: float) -> None:
        gpu = verdict.gpu
        text = f"{gpu} is {verdict.state}" + (f": {verdict.reason}" if verdict.reason else "")
        self._event(
            coordinator, _KINDS[verdict.state], severity_of(verdict.state), text, now, gpu,
            details={
                "reason": verdict.reason,
                "action": verdict.action,
                "evidence": [list(each) for each in verdict.evidence],
            },
        )  # fmt: skip
        if verdict.state != "healthy":
            coordinator.desk.note(coordinator.fleet[gpu].replica, now, text)

    def _tell_agents(self, coordinator: Coordinator, changed: Sequence[Verdict]) -> None:
        states: dict[str, dict[str, GpuState]] = {}
        for verdict in changed:
            host = coordinator.fleet[verdict.gpu].host
            states.setdefault(host, {})[verdict.gpu] = verdict.state
        for host, own in states.items():
            self._outgoing.put(Order(message=m.SetVerdicts(states=own), host=host))

    def _event(
        self,
        coordinator: Coordinator,
        kind: str,
        severity: Severity,
        message: str,
        now: float,
        gpu: str | None = None,
        details: dict[str, object] | None = None,
    ) -> None:
        view = coordinator.fleet[gpu] if gpu else None
        self._outgoing.put(
            event_of(
                self._run,
                coordinator.number,
                kind,
                severity,
                message,
                now,
                view=view,
                details=details,
            )
        )


def _weights(model: CostModel, plan: ReplicaPlan) -> dict[str, float]:
    """GPU id -> its part of the work of a step, relative to a healthy slot and sample."""
    load = ReplicaLoad(
        holders=plan.holders,
        live=plan.live,
        caps_w=plan.caps_w or (1.0,) * len(plan.gpus),
        num_samples=plan.num_samples,
    )
    works = model.loads_by_slot(load)
    return {plan.gpus[slot]: works[slot] * plan.num_samples for slot in plan.live}
