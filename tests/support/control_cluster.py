"""A simulated cluster around a coordinator: agents and workers that answer as real ones would.

Time is simulated; `tests.support.control_ranks` plays the workers. `SimCluster.check` says what
must hold after any history.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

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
from runtime.control.instructions import (
    Answer,
    FindCheckpoint,
    Finish,
    Instruction,
    Order,
    Publish,
    Record,
    Seal,
)
from runtime.plan.generation import GenerationPlan
from runtime.plan.manifest import Start
from storage.commands import Command, CommandResult, Decide, Fault, Trigger
from storage.records import (
    CommandAnswered,
    DecisionMade,
    EventHappened,
    GenerationFormed,
    LedgerSpent,
    Proposal,
    RunEnded,
    StepCommitted,
)
from tests.support.control_ranks import SimRanks, SimWorker
from tests.support.line import line_of

TICK_S = 0.1
LATENCY_S = 0.002

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
class SimCluster:
    """Drives a coordinator; `entries` is the journal, `answers` what people were told.

    slow_start: GPU ids whose workers come up only when `come_up` is called.
    """

    config: Config
    run_id: str = "sim"
    checkpoints: str = ""
    slow_start: set[str] = field(default_factory=set)
    now: float = 1_000.0
    entries: list[Any] = field(default_factory=list)
    proposals: dict[str, Proposal] = field(default_factory=dict)
    answers: dict[str, CommandResult] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    seals: list[Seal] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    gone_for_good: bool = False
    finish: Finish | None = None

    def __post_init__(self) -> None:
        self.began_at = self.now
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._ids = itertools.count(1)
        self._kept: dict[str, list[m.FromAgent]] = {}
        self.coordinator = Coordinator(
            self.config,
            run=self.run_id,
            store=("127.0.0.1", 1),
            now=self.now,
            checkpoints=self.checkpoints,
        )
        self.host_of = {view.gpu: view.host for view in self.coordinator.fleet}
        self.ranks = SimRanks(
            self.config, host_of=self.host_of, slow_start=self.slow_start, cluster=self
        )
        for host in sorted(set(self.host_of.values())):
            self._to_controller(host, self._hello(host))
        self.later(TICK_S, self._tick)

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
            self.ranks.kill(gpu)

    def stop(self, gpu: str) -> None:
        """SIGSTOP: nothing comes from it any more."""
        self.ranks.stop(gpu)

    def jam(self, gpu: str) -> None:
        """It hangs in its own computation; its pulses go on."""
        self.workers[gpu].stuck = True

    def commit_on(self, *gpus: str, told: bool = False) -> None:
        """All ranks synchronise the step at hand, only `gpus` get as far as applying it.

        told: rank 0 is among them and has told the controller.
        """
        plan = self._plan
        done = self.ranks.step_done(plan)
        for gpu in plan.members():
            worker = self.workers[gpu]
            worker.synced = True
            if gpu in gpus:
                self.ranks.apply(worker, done)
        if told:
            self.from_agent(plan.members()[0], done)

    def lose_commit(self) -> None:
        """No collective of this generation ends any more, though nobody is at fault."""
        self.ranks.lost_generation = self._plan.generation

    def come_up(self, gpu: str) -> None:
        """A worker that was slow to start is there."""
        self.slow_start.discard(gpu)
        self.ranks.start(gpu)

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
            reason=more.pop("reason", "as agreed"),
            **more,
        )
        return self.submit(command)

    def approve(self, proposal: Proposal, kind: str = "") -> CommandResult:
        """Approve the recommendation, or the option of `kind`."""
        option = None
        if kind:
            option = next(i for i, o in enumerate(proposal.options) if o.kind == kind)
        return self.decide(proposal, option=option)

    def trigger(self, replica: int, kind: str, undoes: str = "") -> CommandResult:
        return self.submit(
            Trigger(
                id=f"c{next(self._ids)}",
                at=self.now,
                who="ada",
                via="cli",
                replica=replica,
                kind=kind,  # type: ignore[arg-type]
                undoes=undoes,
            )
        )

    def undo(self, proposal: Proposal) -> CommandResult:
        return self.trigger(proposal.replica, proposal.kind, undoes=proposal.id)

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
    def workers(self) -> dict[str, SimWorker]:
        return self.ranks.workers

    @property
    def committed(self) -> int:
        return self.coordinator.progress.committed

    @property
    def steps(self) -> list[StepCommitted]:
        return [e for e in self.entries if isinstance(e, StepCommitted)]

    @property
    def line(self) -> list[StepCommitted]:
        return line_of(self.entries)

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
        steps = self.line
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
            skipped = math.isnan(step.grad_norm)
            assert step.tokens == (0 if skipped else batch * self.config.train.seq_len)

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
            if decision.verdict != "approved_in_part":
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
            once = {s.step: s.tokens for s in reversed(self.steps)}
            assert sum(s.tokens for s in spans) == sum(once.values())

    # the clock -------------------------------------------------------------------------------

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._count), act))

    def _tick(self) -> None:
        self._carry_out(self.coordinator.tick(self.now))
        if self.finish is None:
            self.later(TICK_S, self._tick)

    # messages --------------------------------------------------------------------------------

    def _hello(self, host: str) -> m.AgentHello:
        own = tuple(gpu for gpu, h in self.host_of.items() if h == host)
        pids = {gpu: self.workers[gpu].pid for gpu in own if gpu in self.workers}
        return m.AgentHello(host=host, pid=1, gpus=own, workers=pids)

    def from_agent(self, gpu: str, message: m.FromAgent) -> None:
        host = self.host_of[gpu]
        if host in self.cut:
            if not isinstance(message, m.Pulse):
                self._kept.setdefault(host, []).append(message)
            return
        self._to_controller(host, message)

    def _to_controller(self, host: str, message: m.FromAgent) -> None:
        # Through JSON, as on the wire.
        message = m.decode_from_agent(m.encode(message))
        self.later(LATENCY_S, lambda: self._handle(message))

    def _handle(self, message: m.FromAgent) -> None:
        self._carry_out(self.coordinator.handle(message, self.now))

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            answered = isinstance(one, Record) and isinstance(one.entry, CommandAnswered)
            quits = isinstance(one, Order) and one.message == m.Quit()
            late = isinstance(one, Answer) or answered or quits
            assert self.finish is None or late, f"{one} after the end"
            if isinstance(one, Order):
                self.orders.append(one)
                for host in sorted(set(self.host_of.values())):
                    if one.host in (None, host) and host not in self.cut:
                        order = m.decode_to_agent(m.encode(one.message))
                        self.later(LATENCY_S, lambda o=order, h=host: self.ranks.obey(o, h))
            elif isinstance(one, Record):
                self.entries.append(one.entry)
            elif isinstance(one, Publish):
                self.entries.append(one.proposal)
                self.proposals[one.proposal.id] = one.proposal
            elif isinstance(one, Answer):
                self.answers[one.result.id] = one.result
            elif isinstance(one, Seal):
                self.seals.append(one)
            elif isinstance(one, FindCheckpoint):
                self.later(LATENCY_S, self._find_checkpoint)
            else:
                self.finish = one

    def _find_checkpoint(self) -> None:
        start = None
        if self.seals:
            newest = self.seals[-1]
            step = newest.manifest.applied_step
            start = Start(checkpoint=newest.folder, run="sim", step=step)
        self.coordinator.fallback.found(self.coordinator, start, "", self.now)
        self._carry_out(self.coordinator.outgoing.take())

    @property
    def _plan(self) -> GenerationPlan:
        plan = self.coordinator.plan
        assert plan is not None
        return plan


def running(*gpus: int, steps: int = 3, **more: object) -> SimCluster:
    """A cluster that has committed some steps with everybody there."""
    cluster = SimCluster(sim_config(*(gpus or (3, 3)), **more))  # type: ignore[arg-type]
    cluster.run_steps(steps)
    return cluster


def waiting(*gpus: int, **more: object) -> tuple[SimCluster, Proposal]:
    """A cluster that lost rack-0/1, and the proposal for replica 0."""
    cluster = SimCluster(sim_config(*(gpus or (3, 3)), **more))  # type: ignore[arg-type]
    cluster.run_steps(4)
    cluster.kill("rack-0/1")
    return cluster, cluster.wait_for_proposal(0)


def refused(cluster: SimCluster, code: str, command: str = "") -> bool:
    """Whether the newest (or the named) answer is a refusal with `code`."""
    result = cluster.answers[command] if command else list(cluster.answers.values())[-1]
    return not result.ok and result.code == code
