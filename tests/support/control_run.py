"""A small real run (worker processes, sockets, files) that tests drive and then look through."""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.bench.drill import Drill, lost_steps
from runtime.config import (
    ClusterConfig,
    Config,
    ControlConfig,
    EmulatedConfig,
    ModelConfig,
    RackConfig,
    TrainConfig,
)
from runtime.control.local import LocalRun
from runtime.control.outbox import Outbox
from runtime.engine.reference import Reference
from storage.commands import Fault, Stop
from storage.records import (
    DecisionMade,
    EventHappened,
    JournalEntry,
    LedgerSpent,
    Proposal,
    ProposalChanged,
    RunEnded,
    RunStarted,
    StepCommitted,
)
from tests.support.line import line_of
from tests.support.services import wait_until

MODEL = ModelConfig(
    num_layers=2,
    hidden=32,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=4,
    mlp_hidden=56,
    mlp_block=8,
)
DEADLINE_S = 30.0


def run_config(*gpus: int, step_s: float = 0.1, steps: int = 0) -> Config:
    return Config(
        name="test",
        model=MODEL,
        train=TrainConfig(
            seq_len=16, global_batch=12, micro_batch=6, steps=steps, state_hash_every=5
        ),
        cluster=ClusterConfig(
            racks=tuple(RackConfig(name=f"rack-{i}", gpus=n) for i, n in enumerate(gpus))
        ),
        emulated=EmulatedConfig(step_s=step_s),
        control=ControlConfig(step_deadline_s=4.0),
    )


class Trial:
    """One run and what a person with a shell could do to it."""

    def __init__(self, run: LocalRun, config: Config, home: Path) -> None:
        self.run = run
        self.config = config
        self.drill = Drill(run)
        # What an undisturbed run begins as.
        self.make_reference = lambda: Reference(config)
        self._home = home

    @property
    def coordinator(self) -> Any:
        return self.run.controller.coordinator

    # actions ---------------------------------------------------------------------------------

    def signal(self, gpu: str, number: int) -> None:
        os.kill(self.drill.pids()[gpu], number)

    def kill(self, *gpus: str) -> None:
        pids = self.drill.pids()
        for gpu in gpus:
            os.kill(pids[gpu], signal.SIGKILL)

    def repair(self, gpu: str) -> None:
        self.run.submit(
            Fault(id=uuid.uuid4().hex, at=time.time(), who="ada", via="cli", gpu=gpu, kind="repair")
        )

    def stop(self) -> None:
        self.run.submit(Stop(id=uuid.uuid4().hex, at=time.time(), who="ada", via="cli"))
        self.run.join(DEADLINE_S)

    def break_connection(self) -> None:
        """The controller's end of the agent's connection goes away."""
        (channel,) = [channel for _, channel in self.run.controller._channels.values()]
        end = socket.socket(fileno=os.dup(channel._connection.fileno()))
        end.shutdown(socket.SHUT_RDWR)
        end.close()

    # waits -----------------------------------------------------------------------------------

    def until(self, ready: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        wait_until(ready, deadline_s, what)

    def open_for(self, replica: int) -> Proposal | None:
        newest: dict[str, Proposal] = {}
        for entry in self.drill.entries:
            if isinstance(entry, ProposalChanged):
                newest[entry.proposal.id] = entry.proposal
        found = [p for p in newest.values() if p.replica == replica and p.state == "open"]
        return found[0] if found else None

    def proposal(self, replica: int) -> Proposal:
        self.until(lambda: self.open_for(replica) is not None, f"a proposal for replica {replica}")
        found = self.open_for(replica)
        assert found is not None
        return found

    def approve(self, replica: int) -> None:
        """Approve what is proposed, and wait until it has committed a step."""
        mark = self.drill.approve(self.proposal(replica))
        self.drill.next_generation(mark)

    def more_steps(self, count: int) -> StepCommitted:
        return self.drill.more_steps(count, DEADLINE_S)

    def left_out(self, *replicas: int) -> None:
        """Wait until a step is committed without these replicas."""

        def without() -> bool:
            last = self.drill.commits[-1]
            return not {replica for replica, _, _ in last.samples} & set(replicas)

        self.until(without, f"a step without {replicas}")

    # looks -----------------------------------------------------------------------------------

    def shape(self) -> list[tuple[int, ...]]:
        return [r.live if r.mode == "training" else () for r in self.coordinator.plan.replicas]

    def events(self, kind: str) -> list[EventHappened]:
        return [e for e in self.drill.entries if isinstance(e, EventHappened) and e.kind == kind]

    def journal(self) -> list[JournalEntry]:
        outbox = Outbox(self._home / "journal", run=self.run.run, store=None)
        try:
            return outbox.read_all()
        finally:
            outbox.close()

    def check(self) -> None:
        """What must hold whatever happened: call after the run has ended."""
        journal = self.journal()
        assert [entry.seq for entry in journal] == list(range(1, len(journal) + 1))
        assert isinstance(journal[0], RunStarted)
        assert isinstance(journal[-1], RunEnded)
        steps = [entry for entry in journal if isinstance(entry, StepCommitted)]
        first = journal[0].first_step
        assert lost_steps(line_of(journal), first) == 0
        batch = self.config.train.global_batch
        for step in steps:
            taken = sorted(i for _, first, num in step.samples for i in range(first, first + num))
            assert taken == list(range(step.step * batch, (step.step + 1) * batch))
        spans = [entry for entry in journal if isinstance(entry, LedgerSpent)]
        wall_s = journal[-1].at - journal[0].at
        assert sum(s.end - s.begin for s in spans) == pytest.approx(wall_s, abs=1e-3)
        decided = [e.proposal for e in journal if isinstance(e, DecisionMade)]
        assert len(decided) == len(set(decided))
        assert not self.events("states_differ")
        assert not self.events("steps_untold")
        # Those that were lost and run again, too: they are the same steps.
        undisturbed = self._undisturbed(1 + max(s.step for s in steps))
        expected = [undisturbed[s.step] for s in steps]
        assert [s.loss for s in steps] == pytest.approx(expected, rel=1e-4)

    def _undisturbed(self, num_steps: int) -> list[float]:
        """Losses of the same steps in one process that nothing happens to."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            reference = self.make_reference()
            return [reference.step()[0] for _ in range(num_steps)]
        finally:
            torch.set_num_threads(threads)


@contextmanager
def trial(config: Config, home: Path, **more: Any) -> Iterator[Trial]:
    """A run with all workers up; ends it, and leaves no process behind. more: of `LocalRun`."""
    with LocalRun(config, home=home, **more) as run:
        made = Trial(run, config, home)
        made.drill.more_steps(3, 60.0)
        pids = [view.pid for view in made.coordinator.fleet]
        yield made
    for pid in pids:
        wait_until(lambda p=pid: not Path(f"/proc/{p}").exists(), 10.0, f"the end of {pid}")
