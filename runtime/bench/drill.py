"""A run under drill: SIGKILL, approvals and repairs from outside, and what came of them.

It sees a run as an operator does (worker pids, journal entries, proposals) and never reaches into
the engine. Every wait has a deadline.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.control.local import LocalRun
from runtime.errors import CounterpoiseError
from storage.commands import CommandResult, Decide, Fault
from storage.records import GenerationFormed, Proposal, ProposalChanged, StepCommitted

START_DEADLINE_S = 40.0
DEADLINE_S = 20.0
WHO = "bench"


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment in a run: entries so far, its generation, seconds since the epoch."""

    index: int
    generation: int
    at: float


class Drill:
    """Acts on one `LocalRun` and waits for what follows."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run

    @property
    def entries(self) -> Sequence[Any]:
        return list(self._run.entries)

    @property
    def commits(self) -> list[StepCommitted]:
        return [entry for entry in self.entries if isinstance(entry, StepCommitted)]

    @property
    def generations(self) -> list[GenerationFormed]:
        return [entry for entry in self.entries if isinstance(entry, GenerationFormed)]

    def pids(self) -> dict[str, int]:
        """GPU id -> pid of every worker that is alive."""
        fleet = self._run.controller.coordinator.fleet
        return {view.gpu: view.pid for view in fleet if view.status == "alive" and view.pid}

    def mark(self) -> Mark:
        return Mark(
            index=len(self._run.entries),
            generation=self._run.controller.coordinator.number,
            at=time.time(),
        )

    # actions ---------------------------------------------------------------------------------

    def kill(self, gpu: str) -> Mark:
        """SIGKILL to the worker of `gpu`, from outside: nobody is told."""
        pid = self.pids()[gpu]
        mark = self.mark()
        os.kill(pid, signal.SIGKILL)
        return mark

    def approve(self, proposal: Proposal) -> Mark:
        """Approve what the proposal recommends.

        Raises:
            CounterpoiseError: the run refused.
        """
        mark = self.mark()
        command = Decide(
            id=uuid.uuid4().hex,
            at=mark.at,
            who=WHO,
            via="cli",
            proposal=proposal.id,
            generation=proposal.generation,
            revision=proposal.revision,
            verdict="approved",
            option=proposal.recommended,
        )
        self._run.submit(command)
        answer = self._run.wait_for(
            lambda entry: isinstance(entry, CommandResult) and entry.id == command.id,
            DEADLINE_S,
            after=mark.index,
        )
        if not answer.ok:
            raise CounterpoiseError(f"{proposal.id} was not approved: {answer.message}")
        return mark

    def repair(self, gpu: str) -> Mark:
        mark = self.mark()
        self._run.submit(
            Fault(id=uuid.uuid4().hex, at=mark.at, who=WHO, via="cli", gpu=gpu, kind="repair")
        )
        return mark

    # what follows ----------------------------------------------------------------------------

    def proposal(self, since: Mark) -> Proposal:
        """The proposal that opened after `since`, in its newest form."""
        entry = self._run.wait_for(
            lambda entry: isinstance(entry, ProposalChanged) and entry.proposal.state == "open",
            DEADLINE_S,
            after=since.index,
        )
        assert isinstance(entry, ProposalChanged)
        return entry.proposal

    def next_generation(self, since: Mark) -> StepCommitted:
        """The first step committed by a generation after the one of `since`."""
        entry = self._run.wait_for(
            lambda entry: isinstance(entry, StepCommitted) and entry.generation > since.generation,
            DEADLINE_S,
            after=since.index,
        )
        assert isinstance(entry, StepCommitted)
        return entry

    def more_steps(self, count: int, deadline_s: float = DEADLINE_S) -> StepCommitted:
        """Wait until `count` more steps are committed."""
        commits = self.commits
        wanted = (commits[-1].step if commits else -1) + count
        entry = self._run.wait_for(
            lambda entry: isinstance(entry, StepCommitted) and entry.step >= wanted, deadline_s
        )
        assert isinstance(entry, StepCommitted)
        return entry


def lost_steps(commits: Sequence[StepCommitted], first: int = 0) -> int:
    """How many steps a run's commits, which should count up from `first`, lack or have twice."""
    steps = [commit.step for commit in commits]
    distinct = set(steps)
    expected = max(distinct, default=first - 1) + 1 - first
    return (expected - len(distinct)) + (len(steps) - len(distinct))
