"""A coordinator with health joined, in simulated time, whose workers answer at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from runtime.config import Config
from runtime.control import messages as m
from runtime.control.coordinator import Coordinator
from runtime.control.instructions import Answer, Instruction, Order, Publish, Record
from runtime.health.observation import Observation
from storage.commands import CommandResult, Report
from storage.records import EventHappened, Proposal

CONFIG = Config()
T0 = 2_000_000_000.0


class Run:
    """A coordinator with workers that answer at once; `step` commits one step with shares."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.now = T0
        self.ids = itertools.count()
        self.coordinator = Coordinator(config, run="r", store=("127.0.0.1", 1), now=T0)
        self.proposals: dict[str, Proposal] = {}
        self.events: list[EventHappened] = []
        self.answers: list[CommandResult] = []
        self.states: dict[str, str] = {}
        self.number = 0
        hosts = {view.host for view in self.coordinator.fleet}
        gpus = [view.gpu for view in self.coordinator.fleet]
        for host in hosts:
            self.tell(m.AgentHello(host=host, pid=1, gpus=tuple(gpus), workers={}))
        for number, gpu in enumerate(gpus):
            self.tell(m.WorkerReady(gpu=gpu, pid=100 + number))
        self.enter()
        for _ in range(20):
            self.step()

    def take(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Publish):
                self.proposals[each.proposal.id] = each.proposal
            elif isinstance(each, Record) and isinstance(each.entry, EventHappened):
                self.events.append(each.entry)
            elif isinstance(each, Answer):
                self.answers.append(each.result)
            elif isinstance(each, Order) and isinstance(each.message, m.SetVerdicts):
                self.states |= each.message.states

    def tell(self, message: m.FromAgent) -> None:
        decoded = m.decode_from_agent(m.encode(message))
        self.take(self.coordinator.handle(decoded, self.now))

    def enter(self) -> None:
        plan = self.coordinator.plan
        assert plan is not None
        for gpu in plan.members():
            self.tell(m.Entered(gpu=gpu, generation=plan.generation, seconds=0.1, bytes_received=0))

    def step(self, factor: Callable[[str], float] = lambda _gpu: 1.0) -> None:
        plan = self.coordinator.plan
        assert plan is not None
        members = plan.members()
        weights = {
            gpu: weight
            for gpus in self.coordinator.examiner._weights.values()
            for gpu, weight in gpus.items()
        }
        jitter = itertools.cycle((1.0, 1.01, 0.99, 1.005))
        shares = [0.1 * weights.get(gpu, 0.0) * factor(gpu) * next(jitter) for gpu in members]
        self.now += 1.0
        self.tell(
            m.StepDone(
                gpu=members[0],
                generation=plan.generation,
                step=self.coordinator.progress.committed,
                at=self.now,
                loss=2.0,
                grad_norm=1.0,
                tokens=64,
                step_s=1.0,
                exposed_sync_s=0.0,
                share_s=tuple(shares),
            )
        )

    def see(
        self, code: int | str | None, verdict: str, *, gpu: str = "rack-0/3", **more: object
    ) -> str:
        seen = Observation(
            source="kernel_log", gpu=gpu, code=code, verdict=verdict, severity="critical", **more
        )  # type: ignore[arg-type]
        told = m.Observed(host="localhost", id=f"o{next(self.ids)}", observation=seen)
        self.tell(told)
        return told.id

    def report(self, state: str, gpu: str = "rack-0/3") -> CommandResult:
        command = Report(
            id=f"c{next(self.ids)}", at=self.now, who="ada", via="cli", gpu=gpu, state=state,
            reason="the fan is loud",
        )  # type: ignore[arg-type]  # fmt: skip
        self.take(self.coordinator.command(command, self.now))
        return self.answers[-1]

    def open(self) -> list[Proposal]:
        return [p for p in self.proposals.values() if p.state == "open"]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]
