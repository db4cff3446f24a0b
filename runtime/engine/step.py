"""One training step: compute, synchronise, commit, apply.

The commit is one reduction over the whole world that carries gradient norm, loss and every rank's
compute time; whoever comes out of it knows that all ranks hold the synchronised gradients. What
a step trains on follows from the plan and its number, whichever replica takes which samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.config import TrainConfig
from runtime.engine.data import Text
from runtime.engine.fail_points import Point
from runtime.engine.finite import NotFinite, Probe, locate
from runtime.engine.group import Group
from runtime.engine.model import SlotModel
from runtime.engine.optimizer import apply_step
from runtime.engine.state import State
from runtime.engine.state_hash import Difference, find_difference
from runtime.engine.stopwatch import Stopwatch
from runtime.engine.sync import GradientSync
from runtime.engine.watch import Watch
from runtime.errors import CounterpoiseError, GenerationAborted
from runtime.plan.generation import NOT_FINITE, GenerationPlan, ReplicaPlan


class NonFiniteError(CounterpoiseError):
    """Loss or gradient norm of a step is not finite, twice; no rank has applied or counted it."""

    def __init__(self, step: int, seen: NotFinite) -> None:
        super().__init__(f"step {step} is not finite: first {seen.where}")
        self.step = step
        self.seen = seen


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a committed step did; only sample range and sync time differ between ranks.

    loss: mean over the tokens of the global batch. grad_norm: before clipping; NOT_FINITE when the
    step was skipped: it counts, but has moved nothing. tokens: of the global batch.
    first_sample, num_samples: of this rank's replica. compute_s: by world rank, without waits.
    exposed_sync_s: from the end of backward to synchronised gradients, packing and waits for slower
    ranks included: what overlap could not hide. hash_ok: whether all holders' states agree, None
    when not compared. leave: some rank asked to leave; all leave after this step. not_finite: what
    was not finite when the step was first run, or both times. difference: whose states disagree.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    first_sample: int
    num_samples: int
    compute_s: tuple[float, ...]
    exposed_sync_s: float
    hash_ok: bool | None = None
    leave: bool = False
    not_finite: NotFinite | None = None
    difference: Difference | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Commit:
    """What the commit reduction said. loss_sum: of this rank's replica alone."""

    grad_norm: float
    loss: float
    leave: bool
    compute_s: tuple[float, ...]
    loss_sum: float
    exposed_sync_s: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.grad_norm) and math.isfinite(self.loss)


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """Runs steps of one generation on one rank.

    model: None on a standby rank. counted: ranges of the gradients this rank counts in the
    norm. reports_loss: one rank per training replica does.
    """

    train: TrainConfig
    plan: GenerationPlan
    replica: ReplicaPlan
    rank: int
    state: State
    model: SlotModel | None
    sync: GradientSync
    world: Group
    text: Text
    watch: Watch
    counted: tuple[slice, ...]
    reports_loss: bool
    at: Callable[[Point], None]

    def run(
        self,
        before_commit: Callable[[], float | None],
        leave: Callable[[], bool] = lambda: False,
    ) -> StepResult:
        """Run the next step to its end; every rank of the world must call it.

        before_commit: called once the gradients are synchronised; the emulated pace waits in it. If
            it returns a number, that replaces the measured compute seconds.
        leave: asked right before the commit; when it is true on any rank, every rank learns so from
            the commit itself, so that all leave at the same boundary.

        Not finite, the step is run once more, to tell a passing fault from one that stays and to
        see where it begins. Then `train.non_finite` holds: skip it on all ranks alike, or stop.

        Raises:
            GenerationAborted: the state then is either before or after the step, as
                `State.applied_step` and `State.synced` say.
            NonFiniteError: on all ranks alike, nothing applied.
        """
        step, state = self.state.applied_step, self.state
        commit = self._attempt(step, before_commit, leave)
        seen: NotFinite | None = None
        if not commit.finite:
            probe = Probe(state.layout)
            probe.loss(torch.tensor(commit.loss_sum))
            seen = locate(probe, state, self.world, again=False)
            probe = Probe(state.layout)
            commit = self._attempt(step, before_commit, leave, probe)
            if not commit.finite:
                seen = locate(probe, state, self.world, again=True)
        if seen is not None and seen.again and self.train.non_finite == "stop":
            state.synced = False
            raise NonFiniteError(step, seen)
        grad_norm = commit.grad_norm if commit.finite else NOT_FINITE
        self.watch.phase = "compute"
        self.at(Point.BEFORE_APPLY)
        apply_step(self.train, state, grad_norm)
        self.at(Point.AFTER_APPLY)
        compared, difference = self._compare_states()
        return StepResult(
            step=step,
            loss=commit.loss,
            grad_norm=grad_norm,
            tokens=self._tokens,
            first_sample=self.plan.first_sample(self.replica.replica, step),
            num_samples=self.replica.num_samples,
            compute_s=commit.compute_s,
            exposed_sync_s=commit.exposed_sync_s,
            hash_ok=difference is None if compared else None,
            leave=commit.leave,
            not_finite=seen,
            difference=difference,
        )

    def _attempt(
        self,
        step: int,
        before_commit: Callable[[], float | None],
        leave: Callable[[], bool],
        probe: Probe | None = None,
    ) -> _Commit:
        """Compute, synchronise and commit; nothing is applied yet."""
        state, watch = self.state, self.watch
        watch.phase = "compute"
        watch.waited_s = 0.0
        started = time.perf_counter()
        state.synced = False
        state.grads.zero_()
        self.at(Point.STEP_START)
        loss_sum = self._accumulate(step, probe)
        self.at(Point.BEFORE_SYNC)
        exposed = Stopwatch(streamed=watch.streamed)
        with exposed.running():
            self.sync.finish()
        state.synced = True
        self.at(Point.BEFORE_COMMIT)
        paced_s = before_commit()
        busy_s = time.perf_counter() - started - watch.waited_s
        watch.phase = "commit"
        totals = self._commit(loss_sum, leave(), busy_s if paced_s is None else paced_s)
        self.at(Point.AFTER_COMMIT)
        return _Commit(
            grad_norm=math.sqrt(totals[0]),
            loss=totals[1] / self._tokens,
            leave=totals[2] > 0,
            compute_s=tuple(totals[3:]),
            loss_sum=loss_sum,
            exposed_sync_s=exposed.seconds,
        )

    @property
    def _tokens(self) -> int:
        return self.plan.global_batch * self.train.seq_len

    def _accumulate(self, step: int, probe: Probe | None) -> float:
        """Forward and backward over this replica's samples; returns its loss sum.

        With a probe the gradients wait for backward's end, to be looked at before they are summed.
        """
        first = self.plan.first_sample(self.replica.replica, step)
        last = first + self.replica.num_samples
        if self.model is None or first == last:
            self.sync.begin()
            return 0.0
        if probe is not None:
            probe.parameters(self.state)
        self.model.probe = probe
        total: torch.Tensor | None = None
        for start in range(first, last, self.train.micro_batch):
            stop = min(start + self.train.micro_batch, last)
            tokens = self.text.samples(start, stop).to(self.state.params.device)
            loss = self.model.loss(tokens, start - first, start)
            total = loss.detach() if total is None else total + loss.detach()
            if stop == last:
                self.at(Point.AFTER_FORWARD)
                if probe is None:
                    self.sync.begin()
            # Not backward(gradient): given one, torch imports sympy, in every worker's first step.
            (loss * (1.0 / self._tokens)).backward()
        if probe is not None:
            probe.gradients(self.state)
            self.sync.begin()
        return float(total) if total is not None else 0.0

    @torch.no_grad()
    def _commit(self, loss_sum: float, leave: bool, compute_s: float) -> list[float]:
        """Sum (norm squared, loss, wishes to leave, compute seconds by rank) over the world: the
        commit barrier."""
        vector = torch.zeros(3 + self.world.size, dtype=torch.float64)
        vector[1] = loss_sum if self.reports_loss else 0.0
        vector[2] = float(leave)
        vector[3 + self.rank] = compute_s
        vector = vector.to(self.state.params.device)
        for part in self.counted:
            norm = torch.linalg.vector_norm(self.state.grads[part], dtype=torch.float64)
            vector[0] += norm.square()
        self.world.all_reduce(vector, on_host=True)
        return [float(value) for value in vector.tolist()]

    def _compare_states(self) -> tuple[bool, Difference | None]:
        """Whether states were compared after this step, and what came of it."""
        every = self.train.state_hash_every
        if not every or self.state.applied_step % every:
            return False, None
        self.watch.phase = "commit"
        try:
            self.at(Point.BEFORE_HASHES)
            return True, find_difference(self.state, self.world)
        except GenerationAborted:
            # The step is committed and must be told; the next wait meets the abort again.
            return False, None
