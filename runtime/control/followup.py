"""What applied proposals brought, and what the planner learns from it. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from runtime.config import Config
from runtime.control.messages import StepDone
from runtime.plan.cost import Calibration
from runtime.plan.situation import Costs
from storage.records import Outcome, Proposal

if TYPE_CHECKING:
    from runtime.control.change import Change
    from runtime.control.progress import Progress

# After how many steps an outcome is (re)written; the first step of a generation does not count.
REPORT_AT = (3, 10, 30)
OVERHEAD_STEPS = 20


class Followup:
    """Measures the newest applied proposal, the overhead of steps and the cost of changes."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._proposal = ""
        self._generation = 0
        self._first: Outcome | None = None
        self._steps: list[float] = []
        self._overheads: deque[float] = deque(maxlen=OVERHEAD_STEPS)
        self._changes: deque[float] = deque(maxlen=5)
        self._restart_s: float | None = None

    @property
    def calibration(self) -> Calibration:
        """Overhead of a step beyond the replicas' own shares, as measured."""
        if not self._overheads:
            return Calibration()
        return Calibration(overhead_s=statistics.median(self._overheads))

    @property
    def costs(self) -> Costs:
        """Seconds that changes pause the run, as measured."""
        costs = Costs()
        if self._changes:
            costs = msgspec.structs.replace(costs, reconfigure_s=statistics.median(self._changes))
        if self._restart_s is not None:
            costs = msgspec.structs.replace(costs, restart_s=self._restart_s)
        # A live change, until one was measured: no longer than a start, which has to do more.
        known_s = min(costs.reconfigure_s, costs.restart_s)
        return msgspec.structs.replace(costs, reconfigure_s=known_s)

    def begin(self, proposal: Proposal, generation: int, at: float) -> Outcome:
        """Start to follow `proposal`, whose first step was committed at `at`."""
        decided_at = proposal.decided_at if proposal.decided_at is not None else at
        self._proposal, self._generation, self._steps = proposal.id, generation, []
        self._first = Outcome(
            generation=generation, applied_at=at, first_commit_s=max(0.0, at - decided_at)
        )
        return self._first

    def changed(self, change: Change, done: StepDone, *, first: bool) -> None:
        """`done` is the first step after `change`. first: it is the run's first, too: its
        processes had to start, as they have to in a restart."""
        seconds = max(0.0, done.at - done.step_s - change.began_at)
        if first or change.restart:
            self._restart_s = seconds
        elif change.planned:
            self._changes.append(seconds)

    def observe(self, progress: Progress, done: StepDone) -> tuple[str, Outcome] | None:
        """Take a commit; a proposal id with its outcome when it is time to write it."""
        if progress.expected_step_s > 0:
            self._overheads.append(max(0.0, done.step_s - max(done.share_s, default=0.0)))
        if self._first is None or done.generation != self._generation:
            return None
        if done.at > self._first.applied_at:
            self._steps.append(done.step_s)
        if len(self._steps) not in REPORT_AT:
            return None
        step_s = statistics.median(self._steps)
        ideal = progress.ideal_step_s
        outcome = Outcome(
            generation=self._generation,
            applied_at=self._first.applied_at,
            first_commit_s=self._first.first_commit_s,
            step_s=step_s,
            tokens_per_s=progress.tokens_per_step / step_s if step_s > 0 else 0.0,
            goodput=min(1.0, ideal / step_s) if step_s > 0 else 0.0,
            num_steps=len(self._steps),
        )
        return self._proposal, outcome
