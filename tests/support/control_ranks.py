"""Simulated agents and workers: what they answer to orders, and how they step together.

Nothing is computed; what a worker holds is a step number and a layout. It checks on its own that
every plan can be entered: sources hold what the plan says, and all come to the same step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from runtime.config import Config
from runtime.control import messages as m
from runtime.layout.work import slot_work
from runtime.plan.generation import GenerationPlan, ReplicaPlan, Standing
from runtime.plan.manifest import Part
from runtime.power.emulated import speed_at

PULSE_S = 0.5
ENTER_S = 0.05
OVERHEAD_S = 0.005
COPY_S = 0.002
WRITE_S = 0.3


class Surroundings(Protocol):
    """What the ranks need of the cluster around them."""

    now: float

    def later(self, delay_s: float, act: Callable[[], None]) -> None: ...

    def from_agent(self, gpu: str, message: m.FromAgent) -> None: ...


@dataclass
class SimWorker:
    """One worker process: what it holds and what it is doing.

    stuck: it hangs in its own computation but its pulses go on. silent: it is stopped altogether.
    """

    gpu: str
    pid: int
    applied: int = 0
    layout: int = 0
    synced: bool = False
    norm: float | None = None
    generation: int = 0
    parked: bool = True
    leaving: bool = False
    silent: bool = False
    stuck: bool = False
    phase: str = "idle"
    began_at: float = 0.0
    last: m.StepDone | None = None
    wanted: m.Save | None = None
    saved: m.Saved | None = None


class SimRanks:
    """All workers of a cluster. slow_start: GPU ids whose workers are not up at once."""

    def __init__(
        self,
        config: Config,
        *,
        host_of: Mapping[str, str],
        slow_start: set[str],
        cluster: Surroundings,
    ) -> None:
        self._config = config
        self._host_of = host_of
        self._slow_start = slow_start
        self._cluster = cluster
        self._pids = itertools.count(1000)
        self.workers: dict[str, SimWorker] = {}
        self.plans: dict[int, GenerationPlan] = {}
        self.caps_w: dict[str, float] = {}
        self.slowness: dict[str, float] = {}
        self.lost_generation = 0
        self.write_s = WRITE_S
        # What the word on a step has in it other than usual, by step.
        self.said: dict[int, dict[str, object]] = {}

    def kill(self, gpu: str) -> None:
        worker = self.workers.pop(gpu)
        exited = m.WorkerExited(gpu=gpu, pid=worker.pid, code=-9, at=self._cluster.now)
        self._cluster.from_agent(gpu, exited)

    def stop(self, gpu: str) -> None:
        self.workers[gpu].silent = True

    def obey(self, order: m.ToAgent, host: str) -> None:
        if isinstance(order, m.StartWorkers):
            for gpu in order.gpus:
                if gpu not in self._slow_start and gpu not in self.workers:
                    self.start(gpu)
        elif isinstance(order, m.KillWorker):
            if order.gpu in self.workers and order.pid in (0, self.workers[order.gpu].pid):
                self.kill(order.gpu) if order.how == "kill" else self.stop(order.gpu)
        elif isinstance(order, m.SetDevice):
            self.caps_w.update(order.caps_w)
            self.slowness.update(order.slowness)
        else:
            if isinstance(order, m.EnterGeneration):
                self.plans[order.plan.generation] = order.plan
            for worker in self._own(host):
                self._pass_on(worker, order)

    def _pass_on(self, worker: SimWorker, order: m.ToAgent) -> None:
        if isinstance(order, m.LeaveGeneration):
            self._leave(worker, order)
        elif isinstance(order, m.Save):
            if worker.wanted is not None and worker.wanted.folder == order.folder:
                if worker.saved is not None:
                    self._cluster.from_agent(worker.gpu, worker.saved)
                return
            worker.wanted, worker.saved = order, None
            if not order.step:
                self._cluster.later(self.write_s, lambda: self._save(worker, order))
            elif order.step <= worker.applied:
                late = m.Saved(gpu=worker.gpu, error="was told late", folder=order.folder)
                self._cluster.from_agent(worker.gpu, late)
        elif isinstance(order, m.EnterGeneration) and worker.gpu in order.plan.members():
            self._enter(worker, order.plan)

    def _own(self, host: str) -> list[SimWorker]:
        return [
            worker
            for gpu, worker in list(self.workers.items())
            if self._host_of[gpu] == host and not worker.silent
        ]

    def start(self, gpu: str) -> None:
        worker = SimWorker(gpu=gpu, pid=next(self._pids))
        self.workers[gpu] = worker
        self.slowness[gpu] = 1.0
        self._cluster.from_agent(gpu, m.WorkerReady(gpu=gpu, pid=worker.pid))
        self._cluster.later(PULSE_S, lambda: self._pulse(worker))

    def _pulse(self, worker: SimWorker) -> None:
        if self.workers.get(worker.gpu) is not worker:
            return
        if not worker.silent:
            pulse = m.Pulse(
                gpu=worker.gpu,
                generation=worker.generation,
                phase="compute" if worker.stuck else worker.phase,
                phase_age_s=self._cluster.now - worker.began_at,
            )
            self._cluster.from_agent(worker.gpu, pulse)
        self._cluster.later(PULSE_S, lambda: self._pulse(worker))

    def _standing(self, worker: SimWorker) -> Standing:
        return Standing(
            gpu=worker.gpu,
            generation=worker.generation,
            applied_step=worker.applied,
            layout_generation=worker.layout,
            synced=worker.synced,
            grad_norm=worker.norm,
        )

    def park(self, worker: SimWorker, generation: int) -> None:
        worker.parked, worker.leaving, worker.phase = True, False, "idle"
        self._cluster.from_agent(
            worker.gpu,
            m.Parked(
                gpu=worker.gpu,
                generation=generation,
                standing=self._standing(worker),
                last=worker.last,
            ),
        )

    def _leave(self, worker: SimWorker, order: m.LeaveGeneration) -> None:
        if worker.generation > order.generation:
            return
        if not order.abort:
            worker.leaving = worker.leaving or worker.generation == order.generation
        elif worker.stuck:
            return
        elif not worker.parked or worker.generation < order.generation:
            worker.generation = order.generation
            self.park(worker, order.generation)

    def _enter(self, worker: SimWorker, plan: GenerationPlan) -> None:
        if plan.generation <= worker.generation:
            return
        worker.generation, worker.parked, worker.leaving = plan.generation, False, False
        worker.phase, worker.began_at = "move", self._cluster.now
        self._cluster.later(ENTER_S, lambda: self._agree(plan))

    def together(self, plan: GenerationPlan) -> list[SimWorker] | None:
        """The members, if all are there, in this generation and not hung."""
        found = [self.workers.get(gpu) for gpu in plan.members()]
        for worker in found:
            if worker is None or worker.silent or worker.stuck or worker.parked:
                return None
            if worker.generation != plan.generation:
                return None
        return [worker for worker in found if worker is not None]

    def _agree(self, plan: GenerationPlan) -> None:
        """All members are there: they settle, check that they agree, move state, go on."""
        members = self.together(plan)
        if members is None or all(worker.layout == plan.generation for worker in members):
            return
        sources = {gpu: source for source in plan.sources for gpu in source.gpus}
        for worker in members:
            source = sources.get(worker.gpu)
            if source is not None:
                assert worker.layout > 0, f"{worker.gpu} has no state to bring"
                mine = self.plans[worker.layout].replicas[source.replica]
                assert mine.holders == source.holders, f"{worker.gpu} holds something else"
                roll = plan.roll_forward
                if roll is not None and worker.applied == roll.step:
                    assert worker.synced, f"{worker.gpu} cannot roll forward"
                    worker.applied, worker.norm = roll.step + 1, roll.grad_norm
                assert worker.applied == plan.applied_step, f"{worker.gpu} is not where they are"
        if not plan.sources:
            assert plan.applied_step == 0 or plan.checkpoint, "nobody has the state"
        for worker in members:
            worker.applied, worker.synced, worker.layout = plan.applied_step, False, plan.generation
            self._cluster.from_agent(
                worker.gpu,
                m.Entered(
                    gpu=worker.gpu, generation=plan.generation, seconds=ENTER_S, bytes_received=0
                ),
            )
        self.begin_step(plan)

    def begin_step(self, plan: GenerationPlan) -> None:
        members = self.together(plan)
        if members is None:
            return
        for worker in members:
            worker.began_at, worker.phase = self._cluster.now, "collective"
            worker.synced = False
        step = members[0].applied
        shares = self.shares(plan)
        slowest = members[shares.index(max(shares))]
        slowest.phase = "compute"
        self._cluster.later(max(shares), lambda: setattr(slowest, "phase", "commit"))
        self._cluster.later(max(shares) + OVERHEAD_S, lambda: self._commit(plan, step))

    def shares(self, plan: GenerationPlan) -> tuple[float, ...]:
        """Seconds of every rank's share, as the emulated device would take."""
        emulated = self._config.emulated
        found = []
        for replica in plan.replicas:
            if replica.mode == "out":
                continue
            for slot in replica.live:
                gpu = replica.gpus[slot]
                work = self._work(plan, replica, slot) * self.slowness.get(gpu, 1.0)
                cap_w = self.caps_w.get(gpu) or emulated.normal_cap_w
                found.append(work * emulated.step_s / speed_at(emulated, cap_w))
        return tuple(found)

    def _work(self, plan: GenerationPlan, replica: ReplicaPlan, slot: int) -> float:
        if not replica.num_samples:
            return 0.0
        work = slot_work(
            self._config.model,
            self._config.train.seq_len,
            replica.holders,
            slot,
            num_slots=len(replica.gpus),
        )
        return work * replica.num_samples * len(plan.replicas) / plan.global_batch

    def step_done(self, plan: GenerationPlan) -> m.StepDone:
        first = self.workers[plan.members()[0]]
        shares = self.shares(plan)
        done = m.StepDone(
            gpu=first.gpu,
            generation=plan.generation,
            step=first.applied,
            at=self._cluster.now,
            loss=5.0 / (1 + first.applied),
            grad_norm=1.0 + first.applied,
            tokens=plan.global_batch * self._config.train.seq_len,
            step_s=self._cluster.now - first.began_at,
            exposed_sync_s=0.0,
            share_s=shares,
        )
        return msgspec.structs.replace(done, **self.said.get(done.step, {}))

    def apply(self, worker: SimWorker, done: m.StepDone) -> None:
        worker.applied, worker.synced = done.step + 1, False
        worker.norm = done.grad_norm
        worker.last = msgspec.structs.replace(done, gpu=worker.gpu)
        if worker.wanted is not None and worker.wanted.step == worker.applied:
            copied = m.Copied(gpu=worker.gpu, step=worker.applied, seconds=COPY_S)
            self._cluster.from_agent(worker.gpu, copied)
            wanted = worker.wanted
            self._cluster.later(self.write_s, lambda: self._save(worker, wanted))

    def _commit(self, plan: GenerationPlan, step: int) -> None:
        members = self.together(plan)
        if members is None or any(worker.applied != step for worker in members):
            return
        if plan.generation == self.lost_generation:
            return
        done = self.step_done(plan)
        steps = self._config.train.steps
        leave = any(worker.leaving for worker in members) or 0 < steps <= step + 1
        for worker in members:
            self.apply(worker, done)
        self._cluster.from_agent(members[0].gpu, done)
        if leave:
            for worker in members:
                self.park(worker, plan.generation)
        else:
            self.begin_step(plan)

    def _save(self, worker: SimWorker, wanted: m.Save) -> None:
        if self.workers.get(worker.gpu) is worker:
            saved = m.Saved(gpu=worker.gpu, part=self._part(worker), folder=wanted.folder)
            worker.saved = saved
            self._cluster.from_agent(worker.gpu, saved)

    def _part(self, worker: SimWorker) -> Part:
        return Part(file=f"{worker.gpu}.pt", sha256="", num_bytes=1, units={})
