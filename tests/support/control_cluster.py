"""A simulated cluster around a coordinator: agents and workers that answer as real ones would.

Time is simulated, nothing is computed; what a worker holds is a step number and a layout. It checks
on its own that every plan can be entered: sources hold what the plan says, and nobody loses a step.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime.config import (
    ClusterConfig,
    Config,
    ControlConfig,
    EmulatedConfig,
    ModelConfig,
    PolicyConfig,
    RackConfig,
    TrainConfig,
)
from runtime.control import messages as m
from runtime.control.coordinator import Coordinator
from runtime.control.instructions import Answer, Finish, Instruction, Order, Publish, Record, Seal
from runtime.layout.work import slot_work
from runtime.plan.generation import GenerationPlan, ReplicaPlan, Standing
from runtime.plan.manifest import Part
from runtime.power.emulated import speed_at
from storage.records import (
    Command,
    CommandResult,
    Decide,
    DecisionMade,
    EventHappened,
    Fault,
    GenerationFormed,
    LedgerSpent,
    Proposal,
    RunEnded,
    StepCommitted,
    Trigger,
)

TICK_S = 0.1
PULSE_S = 0.5
LATENCY_S = 0.002
ENTER_S = 0.05
OVERHEAD_S = 0.005

TINY = ModelConfig(
    num_layers=1,
    hidden=16,
    num_query_heads=8,
    num_kv_heads=4,
    head_dim=2,
    mlp_hidden=64,
    mlp_block=8,
    vocab=256,
    vocab_block=32,
)


def sim_config(
    *gpus: int,
    hosts: Iterable[str] = (),
    step_s: float = 0.5,
    steps: int = 0,
    policy: PolicyConfig | None = None,
    control: ControlConfig | None = None,
) -> Config:
    """One rack per number of slots; hosts name the agents, one for all by default."""
    names = list(hosts) or ["localhost"] * len(gpus)
    racks = tuple(
        RackConfig(name=f"rack-{i}", gpus=n, host=h)
        for i, (n, h) in enumerate(zip(gpus, names, strict=True))
    )
    return Config(
        model=TINY,
        train=TrainConfig(seq_len=8, global_batch=12, steps=steps),
        cluster=ClusterConfig(racks=racks),
        emulated=EmulatedConfig(step_s=step_s),
        policy=policy or PolicyConfig(),
        control=control or ControlConfig(),
    )


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


@dataclass
class SimCluster:
    """Drives a coordinator; `entries` is the journal, `answers` what people were told.

    slow_start: GPU ids whose workers come up only when `come_up` is called.
    """

    config: Config
    checkpoints: str = ""
    slow_start: frozenset[str] = frozenset()
    now: float = 1_000.0
    entries: list[Any] = field(default_factory=list)
    proposals: dict[str, Proposal] = field(default_factory=dict)
    answers: dict[str, CommandResult] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    plans: dict[int, GenerationPlan] = field(default_factory=dict)
    workers: dict[str, SimWorker] = field(default_factory=dict)
    caps_w: dict[str, float] = field(default_factory=dict)
    slowness: dict[str, float] = field(default_factory=dict)
    seals: list[Seal] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    lost_generation: int = 0
    gone_for_good: bool = False
    finish: Finish | None = None

    def __post_init__(self) -> None:
        self.began_at = self.now
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._pids = itertools.count(1000)
        self._ids = itertools.count(1)
        self._kept: dict[str, list[m.FromAgent]] = {}
        self.coordinator = Coordinator(
            self.config,
            run="sim",
            store=("127.0.0.1", 1),
            now=self.now,
            checkpoints=self.checkpoints,
        )
        self.host_of = {view.gpu: view.host for view in self.coordinator.fleet}
        for host in sorted(set(self.host_of.values())):
            self._to_controller(host, self._hello(host))
        self._later(TICK_S, self._tick)

    # what tests do ---------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.run_until(lambda: False, seconds, must=False)

    def run_until(self, done: Callable[[], bool], seconds: float = 60.0, must: bool = True) -> None:
        """Let time pass until `done()`, at most `seconds`; fails past that if it `must`."""
        end = self.now + seconds
        while not done():
            if self.finish is not None or not self._queue or self._queue[0][0] > end:
                assert not must, f"did not happen in {seconds:g} s; last: {self.entries[-3:]}"
                self.now = max(self.now, end) if self.finish is None else self.now
                return
            at, _, act = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            act()

    def run_steps(self, count: int, seconds: float = 60.0) -> None:
        """Let `count` more steps be committed."""
        target = self.committed + count
        self.run_until(lambda: self.committed >= target, seconds)

    def kill(self, *gpus: str) -> None:
        """SIGKILL: the agents tell a moment later."""
        for gpu in gpus:
            worker = self.workers.pop(gpu)
            self._from_agent(gpu, m.WorkerExited(gpu=gpu, pid=worker.pid, code=-9, at=self.now))

    def stop(self, gpu: str) -> None:
        """SIGSTOP: nothing comes from it any more."""
        self.workers[gpu].silent = True

    def jam(self, gpu: str) -> None:
        """It hangs in its own computation; its pulses go on."""
        self.workers[gpu].stuck = True

    def commit_on(self, *gpus: str, told: bool = False) -> None:
        """All ranks synchronise the step at hand, only `gpus` get as far as applying it.

        told: rank 0 is among them and has told the controller.
        """
        plan = self._plan
        done = self._step_done(plan)
        for gpu in plan.members():
            worker = self.workers[gpu]
            worker.synced = True
            if gpu in gpus:
                self._apply(worker, done)
        if told:
            self._from_agent(plan.members()[0], done)

    def lose_commit(self) -> None:
        """No collective of this generation ends any more, though nobody is at fault."""
        self.lost_generation = self._plan.generation

    def come_up(self, gpu: str) -> None:
        """A worker that was slow to start is there."""
        self.slow_start -= {gpu}
        self._start(gpu)

    def disconnect(self, host: str) -> None:
        """The connection of an agent breaks: what it says is kept, what it is told is lost."""
        self.cut.add(host)

    def reconnect(self, host: str) -> None:
        """The agent says hello and tells all it kept, as runtime.control.agent does."""
        self.cut.discard(host)
        self._to_controller(host, self._hello(host))
        for message in self._kept.pop(host, []):
            self._to_controller(host, message)

    def submit(self, command: Command) -> CommandResult:
        """Hand in a command; its answer."""
        self._carry_out(self.coordinator.command(command, self.now))
        return self.answers[command.id]

    def decide(
        self, proposal: Proposal, verdict: str = "approved", option: int | None = None, **more: Any
    ) -> CommandResult:
        command = Decide(
            id=more.pop("id", f"c{next(self._ids)}"),
            at=self.now,
            who=more.pop("who", "ada"),
            via="cli",
            proposal=proposal.id,
            generation=more.pop("generation", proposal.generation),
            revision=proposal.revision,
            verdict=verdict,  # type: ignore[arg-type]
            option=option,
            **more,
        )
        return self.submit(command)

    def approve(self, proposal: Proposal, kind: str = "") -> CommandResult:
        """Approve the recommendation, or the option of `kind`."""
        option = None
        if kind:
            option = next(i for i, o in enumerate(proposal.options) if o.kind == kind)
        return self.decide(proposal, option=option)

    def trigger(self, replica: int, kind: str) -> CommandResult:
        return self.submit(
            Trigger(
                id=f"c{next(self._ids)}",
                at=self.now,
                who="ada",
                via="cli",
                replica=replica,
                kind=kind,  # type: ignore[arg-type]
            )
        )

    def fault(self, gpu: str, kind: str, factor: float = 1.0) -> CommandResult:
        return self.submit(
            Fault(
                id=f"c{next(self._ids)}",
                at=self.now,
                who="ada",
                via="cli",
                gpu=gpu,
                kind=kind,  # type: ignore[arg-type]
                factor=factor,
            )
        )

    # what tests look at ----------------------------------------------------------------------

    @property
    def committed(self) -> int:
        return self.coordinator.progress.committed

    @property
    def steps(self) -> list[StepCommitted]:
        return [e for e in self.entries if isinstance(e, StepCommitted)]

    @property
    def decisions(self) -> list[DecisionMade]:
        return [e for e in self.entries if isinstance(e, DecisionMade)]

    @property
    def formed(self) -> list[GenerationFormed]:
        return [e for e in self.entries if isinstance(e, GenerationFormed)]

    def events(self, kind: str) -> list[EventHappened]:
        return [e for e in self.entries if isinstance(e, EventHappened) and e.kind == kind]

    def ordered(self, kind: type) -> list[Any]:
        return [o.message for o in self.orders if isinstance(o.message, kind)]

    def open_for(self, replica: int) -> Proposal | None:
        found = [p for p in self.proposals.values() if p.replica == replica and p.state == "open"]
        assert len(found) <= 1, f"several open proposals for replica {replica}"
        return found[0] if found else None

    def wait_for_proposal(self, replica: int, seconds: float = 30.0) -> Proposal:
        self.run_until(lambda: self.open_for(replica) is not None, seconds)
        found = self.open_for(replica)
        assert found is not None
        return found

    def shape(self) -> list[tuple[int, ...]]:
        """Live slots per replica that trains, () for one that does not."""
        return [r.live if r.mode == "training" else () for r in self._plan.replicas]

    def check(self) -> None:
        """What must hold after any history; see the names of the parts."""
        self._check_steps()
        self._check_generations()
        self._check_proposals()
        self._check_ledger()

    # invariants ------------------------------------------------------------------------------

    def _check_steps(self) -> None:
        steps = self.steps
        numbers = [s.step for s in steps]
        assert numbers == sorted(set(numbers)), "every step once, in order"
        # Only what a host took with it that never came back is missing, and the journal says so.
        missing = len(set(range(self.committed)) - set(numbers))
        assert not missing or (self.events("steps_untold") and self.gone_for_good)
        batch = self.config.train.global_batch
        for step in steps:
            taken = sorted(
                index for _, first, count in step.samples for index in range(first, first + count)
            )
            assert taken == list(range(step.step * batch, (step.step + 1) * batch)), step
            assert step.tokens == batch * self.config.train.seq_len

    def _check_generations(self) -> None:
        told = [p.plan.generation for p in self.ordered(m.EnterGeneration)]
        fresh = list(dict.fromkeys(told))
        assert fresh == list(range(1, len(fresh) + 1)), "strictly increasing, none reused"
        formed = [f.generation for f in self.formed]
        assert formed == sorted(set(formed)), "each formed once"
        for entry in self.formed:
            proposal = self.proposals.get(entry.proposal)
            assert not entry.proposal or proposal is not None

    def _check_proposals(self) -> None:
        last: dict[str, Proposal] = {}
        for entry in self.entries:
            if not isinstance(entry, Proposal):
                continue
            before = last.get(entry.id)
            if before is not None:
                assert entry.revision > before.revision
                assert not before.is_final or entry.state == before.state, (before, entry)
            last[entry.id] = entry
            busy = [p.replica for p in last.values() if not p.is_final]
            assert len(busy) == len(set(busy)), "at most one proposal a replica is not final"
        verdicts: dict[str, list[str]] = {}
        for decision in self.decisions:
            verdicts.setdefault(decision.proposal, []).append(decision.verdict)
        for proposal in last.values():
            given = verdicts.get(proposal.id, [])
            assert len(given) <= 1, "a decision counts once"
            if proposal.state in ("applied", "failed", "applying"):
                assert given == ["approved"], proposal
            if proposal.state == "rejected":
                assert given == ["rejected"]

    def _check_ledger(self) -> None:
        ended = [e for e in self.entries if isinstance(e, RunEnded)]
        spans = [e for e in self.entries if isinstance(e, LedgerSpent)]
        end = self.began_at
        for span in spans:
            assert abs(span.begin - end) < 1e-6, "no gap, no overlap"
            assert span.end >= span.begin
            end = span.end
        ledger = self.coordinator.progress.ledger
        until = ended[0].at if ended else self.now
        assert abs(sum(ledger.totals(until).values()) - (until - self.began_at)) < 1e-6
        if ended:
            assert len(ended) == 1
            assert abs(end - ended[0].at) < 1e-6
            assert sum(s.tokens for s in spans) == sum(s.tokens for s in self.steps)

    # the clock -------------------------------------------------------------------------------

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._count), act))

    def _tick(self) -> None:
        self._carry_out(self.coordinator.tick(self.now))
        if self.finish is None:
            self._later(TICK_S, self._tick)

    # messages --------------------------------------------------------------------------------

    def _hello(self, host: str) -> m.AgentHello:
        own = tuple(gpu for gpu, h in self.host_of.items() if h == host)
        pids = {gpu: self.workers[gpu].pid for gpu in own if gpu in self.workers}
        return m.AgentHello(host=host, pid=1, gpus=own, workers=pids)

    def _from_agent(self, gpu: str, message: m.FromAgent) -> None:
        host = self.host_of[gpu]
        if host in self.cut:
            if not isinstance(message, m.Pulse):
                self._kept.setdefault(host, []).append(message)
            return
        self._to_controller(host, message)

    def _to_controller(self, host: str, message: m.FromAgent) -> None:
        # Through JSON, as on the wire.
        message = m.decode_from_agent(m.encode(message))
        self._later(LATENCY_S, lambda: self._handle(message))

    def _handle(self, message: m.FromAgent) -> None:
        self._carry_out(self.coordinator.handle(message, self.now))

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            late = isinstance(one, Answer) or (isinstance(one, Order) and one.message == m.Quit())
            assert self.finish is None or late, f"{one} after the end"
            if isinstance(one, Order):
                self.orders.append(one)
                for host in sorted(set(self.host_of.values())):
                    if one.host in (None, host) and host not in self.cut:
                        order = m.decode_to_agent(m.encode(one.message))
                        self._later(LATENCY_S, lambda o=order, h=host: self._obey(o, h))
            elif isinstance(one, Record):
                self.entries.append(one.entry)
            elif isinstance(one, Publish):
                self.entries.append(one.proposal)
                self.proposals[one.proposal.id] = one.proposal
            elif isinstance(one, Answer):
                self.answers[one.result.id] = one.result
            elif isinstance(one, Seal):
                self.seals.append(one)
            else:
                self.finish = one

    # agents and workers ----------------------------------------------------------------------

    def _obey(self, order: m.ToAgent, host: str) -> None:
        if isinstance(order, m.StartWorkers):
            for gpu in order.gpus:
                if gpu not in self.slow_start and gpu not in self.workers:
                    self._start(gpu)
        elif isinstance(order, m.KillWorker):
            if order.gpu in self.workers:
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
            self._from_agent(worker.gpu, m.Saved(gpu=worker.gpu, part=self._part(worker)))
        elif isinstance(order, m.EnterGeneration) and worker.gpu in order.plan.members():
            self._enter(worker, order.plan)

    def _own(self, host: str) -> list[SimWorker]:
        return [
            worker
            for gpu, worker in list(self.workers.items())
            if self.host_of[gpu] == host and not worker.silent
        ]

    def _start(self, gpu: str) -> None:
        worker = SimWorker(gpu=gpu, pid=next(self._pids))
        self.workers[gpu] = worker
        self.slowness[gpu] = 1.0
        self._from_agent(gpu, m.WorkerReady(gpu=gpu, pid=worker.pid))
        self._later(PULSE_S, lambda: self._pulse(worker))

    def _pulse(self, worker: SimWorker) -> None:
        if self.workers.get(worker.gpu) is not worker:
            return
        if not worker.silent:
            pulse = m.Pulse(
                gpu=worker.gpu,
                generation=worker.generation,
                phase="compute" if worker.stuck else worker.phase,
                phase_age_s=self.now - worker.began_at,
            )
            self._from_agent(worker.gpu, pulse)
        self._later(PULSE_S, lambda: self._pulse(worker))

    def _standing(self, worker: SimWorker) -> Standing:
        return Standing(
            gpu=worker.gpu,
            generation=worker.generation,
            applied_step=worker.applied,
            layout_generation=worker.layout,
            synced=worker.synced,
            grad_norm=worker.norm,
        )

    def _park(self, worker: SimWorker, generation: int) -> None:
        worker.parked, worker.leaving, worker.phase = True, False, "idle"
        self._from_agent(
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
            self._park(worker, order.generation)

    def _enter(self, worker: SimWorker, plan: GenerationPlan) -> None:
        if plan.generation <= worker.generation:
            return
        worker.generation, worker.parked, worker.leaving = plan.generation, False, False
        worker.phase, worker.began_at = "move", self.now
        self._later(ENTER_S, lambda: self._agree(plan))

    def _together(self, plan: GenerationPlan) -> list[SimWorker] | None:
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
        members = self._together(plan)
        if members is None or all(worker.layout == plan.generation for worker in members):
            return
        sources = {source.gpu: source for source in plan.sources}
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
            assert plan.applied_step == 0, "nobody has the state"
        for worker in members:
            worker.applied, worker.synced, worker.layout = plan.applied_step, False, plan.generation
            self._from_agent(
                worker.gpu,
                m.Entered(
                    gpu=worker.gpu, generation=plan.generation, seconds=ENTER_S, bytes_received=0
                ),
            )
        self._begin_step(plan)

    def _begin_step(self, plan: GenerationPlan) -> None:
        members = self._together(plan)
        if members is None:
            return
        for worker in members:
            worker.began_at, worker.phase = self.now, "collective"
            worker.synced = False
        step = members[0].applied
        shares = self.shares(plan)
        slowest = members[shares.index(max(shares))]
        slowest.phase = "compute"
        self._later(max(shares), lambda: setattr(slowest, "phase", "commit"))
        self._later(max(shares) + OVERHEAD_S, lambda: self._commit(plan, step))

    def shares(self, plan: GenerationPlan) -> tuple[float, ...]:
        """Seconds of every rank's share, as the emulated device would take."""
        emulated = self.config.emulated
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
            self.config.model,
            self.config.train.seq_len,
            replica.holders,
            slot,
            num_slots=len(replica.gpus),
        )
        return work * replica.num_samples * len(plan.replicas) / plan.global_batch

    def _step_done(self, plan: GenerationPlan) -> m.StepDone:
        first = self.workers[plan.members()[0]]
        shares = self.shares(plan)
        return m.StepDone(
            gpu=first.gpu,
            generation=plan.generation,
            step=first.applied,
            at=self.now,
            loss=5.0 / (1 + first.applied),
            grad_norm=1.0 + first.applied,
            tokens=plan.global_batch * self.config.train.seq_len,
            step_s=self.now - first.began_at,
            exposed_sync_s=0.0,
            share_s=shares,
        )

    def _apply(self, worker: SimWorker, done: m.StepDone) -> None:
        worker.applied, worker.synced = done.step + 1, False
        worker.norm = done.grad_norm
        worker.last = msgspec.structs.replace(done, gpu=worker.gpu)

    def _commit(self, plan: GenerationPlan, step: int) -> None:
        members = self._together(plan)
        if members is None or any(worker.applied != step for worker in members):
            return
        if plan.generation == self.lost_generation:
            return
        done = self._step_done(plan)
        steps = self.config.train.steps
        leave = any(worker.leaving for worker in members) or 0 < steps <= step + 1
        for worker in members:
            self._apply(worker, done)
        self._from_agent(members[0].gpu, done)
        if leave:
            for worker in members:
                self._park(worker, plan.generation)
        else:
            self._begin_step(plan)

    def _part(self, worker: SimWorker) -> Part:
        return Part(file=f"{worker.gpu}.pt", sha256="", num_bytes=1, units={})

    @property
    def _plan(self) -> GenerationPlan:
        plan = self.coordinator.plan
        assert plan is not None
        return plan
