"""How far the run is and where its time went: commits, pace, ledger, snapshot. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from runtime.config import Config
from runtime.control.holdings import Units, told
from runtime.control.instructions import Finish, Outgoing, Record, event_of
from runtime.control.messages import StepDone
from runtime.layout.units import num_parameters
from runtime.plan.generation import NOT_FINITE, GenerationPlan
from runtime.plan.ledger import Ledger
from runtime.plan.manifest import Start
from storage.holdings import Holdings
from storage.records import (
    Bucket,
    GenerationFormed,
    JournalEntry,
    LedgerSpent,
    ReplicaMode,
    ReplicaState,
    RunEnded,
    RunRolledBack,
    RunStarted,
    RunState,
    RunStatus,
    StepCommitted,
)

if TYPE_CHECKING:
    from runtime.control.change import Change
    from runtime.control.coordinator import Coordinator
    from runtime.control.power_desk import PowerDesk

BASELINE_STEPS = 20
RATE_STEPS = 10


class _Replay:
    """What a replay of the journal has gathered so far. open_steps: not in the ledger yet."""

    def __init__(self) -> None:
        self.totals: dict[Bucket, float] = {}
        self.tokens = 0
        self.open_steps: list[StepCommitted] = []
        self.healthy = False


class Progress:
    """Counts commits, keeps the healthy baseline and the goodput ledger."""

    def __init__(self, config: Config, *, run: str, now: float, outgoing: Outgoing) -> None:
        self._config = config
        self._run = run
        self._outgoing = outgoing
        self._started_at = now
        self.ledger = Ledger(now)
        self.start_step = 0
        self.committed = 0
        self.formed = False
        self.last: StepDone | None = None
        self.last_commit_at = now
        self.num_skipped = 0
        self._moved = 0
        self._recent: deque[float] = deque(maxlen=RATE_STEPS)
        self._healthy: deque[float] = deque(maxlen=BASELINE_STEPS)
        self._replica_step_s: tuple[float, ...] = ()
        self._told_of: GenerationPlan | None = None
        self._told: tuple[tuple[Units, Holdings | None], ...] = ()
        self.power: PowerDesk | None = None
        self.spares: Callable[[int], tuple[str, ...]] = lambda replica: ()
        self._start = Start()
        self._replay = _Replay()
        # Steps below this were committed before the run went back to a checkpoint.
        self._again_below = 0

    @property
    def told_norm(self) -> float | None:
        """Gradient norm of the last committed step, as told; None when nobody told it."""
        last = self.last
        return last.grad_norm if last is not None and last.step + 1 == self.committed else None

    @property
    def expected_step_s(self) -> float:
        return statistics.median(self._recent) if self._recent else 0.0

    @property
    def ideal_step_s(self) -> float:
        """Step time of the fully healthy run: measured where it can be, else the device model's."""
        if len(self._healthy) >= 3:
            return statistics.median(self._healthy)
        if self._config.cluster.device == "emulated" and self._config.emulated.step_s > 0:
            return self._config.emulated.step_s
        return min(self._healthy, default=0.0)

    @property
    def tokens_per_step(self) -> int:
        return self._config.train.global_batch * self._config.train.seq_len

    # events ----------------------------------------------------------------------------------

    def begin_at(self, start: Start) -> None:
        """The run goes on from a checkpoint."""
        self._start = start
        self.start_step = self.committed = start.step

    def roll_back(self, start: Start) -> None:
        """The run goes back to a checkpoint: the steps since are run again."""
        self._again_below = max(self._again_below, self.committed)
        self.start_step = self.committed = start.step
        self.formed = False

    def started(self, config_json: str) -> None:
        self._outgoing.put(
            Record(
                entry=RunStarted(
                    seq=0,
                    at=self._started_at,
                    run=self._run,
                    name=self._config.name,
                    emulated=self._config.cluster.device == "emulated",
                    device=self._config.cluster.device,
                    config=config_json,
                    seq_len=self._config.train.seq_len,
                    global_batch=self._config.train.global_batch,
                    num_params=num_parameters(self._config.model),
                    continues=self._start.run,
                    first_step=self._start.step,
                )
            )
        )

    def replay(self, entry: JournalEntry) -> None:
        """Take in an entry that an earlier controller wrote; `replayed` ends the sequence."""
        replay = self._replay
        if isinstance(entry, RunStarted):
            self._started_at = entry.at
        elif isinstance(entry, LedgerSpent):
            replay.totals[entry.bucket] = (
                replay.totals.get(entry.bucket, 0.0) + entry.end - entry.begin
            )
            replay.tokens += entry.tokens
            replay.open_steps.clear()
        elif isinstance(entry, GenerationFormed):
            self._moved = entry.bytes_moved
            replay.healthy = all(
                r.mode == "training" and len(r.live) == len(r.gpus) for r in entry.replicas
            )
        elif isinstance(entry, RunRolledBack):
            self._again_below = max(self._again_below, entry.committed)
            self.committed = entry.step
        elif isinstance(entry, StepCommitted):
            self.committed = entry.step + 1
            self._replica_step_s = entry.replica_step_s
            self.last = StepDone(
                gpu="",
                generation=entry.generation,
                step=entry.step,
                at=entry.at,
                loss=None if math.isnan(entry.loss) else entry.loss,
                grad_norm=NOT_FINITE if math.isnan(entry.grad_norm) else entry.grad_norm,
                tokens=entry.tokens,
                step_s=entry.step_s,
                exposed_sync_s=entry.exposed_sync_s,
                share_s=(),
            )
            self.num_skipped = self.num_skipped + 1 if math.isnan(entry.grad_norm) else 0
            replay.open_steps.append(entry)
            if replay.healthy:
                self._healthy.append(entry.step_s)

    def replayed(self, now: float) -> None:
        """Go on counting where the journal ends."""
        replay, self._replay = self._replay, _Replay()
        self.ledger = Ledger.restored(
            self._started_at, replay.totals, tokens=replay.tokens, training=self.last is not None
        )
        for step in replay.open_steps:
            if step.at > self.ledger.marked_at:
                self.ledger.committed(
                    step.at,
                    self.ideal_step_s or step.step_s,
                    tokens=step.tokens,
                    step_s=step.step_s,
                    healthy=replay.healthy,
                    again=step.step < self._again_below,
                )
        self.last_commit_at = now

    def failure(self, happened_at: float, now: float) -> None:
        self.ledger.failed(now, happened_at)
        self._drain()

    def leaving(self, now: float) -> None:
        """A planned change begins at a step boundary."""
        self.ledger.reconfigured(now)

    def paused(self, at: float, now: float) -> None:
        """Nothing trains from `at` on, until a change or a failure is told."""
        self.ledger.paused(at)
        self.pause_goes_on(now)

    def pause_goes_on(self, now: float) -> None:
        self.ledger.spend("paused", now)
        self._drain()

    def generation_published(self, plan: GenerationPlan, bytes_moved: int, now: float) -> None:
        self.formed = False
        self.last_commit_at = now
        self._moved = bytes_moved
        self._recent.clear()
        if bytes_moved:
            text = (
                f"generation {plan.generation} moves {bytes_moved / 1e6:.2f} MB of parameters and "
                "optimizer state between GPUs"
            )
            self._outgoing.put(
                event_of(self._run, plan.generation, "state_moved", "info", text, now)
            )

    def step_committed(
        self, plan: GenerationPlan, done: StepDone, change: Change, *, waiting: bool
    ) -> bool:
        """Take a commit. True: it is the first of its generation."""
        first = not self.formed
        shares = _replica_shares(plan, done.share_s)
        self.committed = done.step + 1
        self.num_skipped = self.num_skipped + 1 if done.grad_norm == NOT_FINITE else 0
        self.last, self.last_commit_at, self._replica_step_s = done, done.at, shares
        healthy = _is_healthy(plan)
        if not first and done.not_finite is None:
            self._recent.append(done.step_s)
            if healthy:
                self._healthy.append(done.step_s)
        # Of a step that was skipped nothing is left: all of its time is lost.
        ideal = (self.ideal_step_s or done.step_s) if self.num_skipped == 0 else 0.0
        self.ledger.committed(
            done.at,
            ideal,
            tokens=done.tokens,
            # What the first step takes beyond the ideal belongs to getting there.
            step_s=None if first else done.step_s,
            waiting=waiting,
            healthy=healthy,
            again=done.step < self._again_below,
        )
        if first:
            self.formed = True
            self._outgoing.put(Record(entry=self._generation_formed(plan, done, change)))
        self._outgoing.put(Record(entry=self._step_record(plan, done, shares)))
        self._drain()
        return first

    def ended(self, finish: Finish, now: float) -> None:
        self.ledger.stopped(now)
        self._drain(everything=True)
        self._outgoing.put(
            Record(
                entry=RunEnded(
                    seq=0, at=now, run=self._run, status=finish.status, reason=finish.reason
                )
            )
        )

    # records ---------------------------------------------------------------------------------

    def _drain(self, *, everything: bool = False) -> None:
        for span in self.ledger.drain(everything=everything):
            self._outgoing.put(
                Record(
                    entry=LedgerSpent(
                        seq=0,
                        at=span.end,
                        run=self._run,
                        bucket=span.bucket,
                        begin=span.begin,
                        end=span.end,
                        tokens=span.tokens,
                    )
                )
            )

    def _step_record(
        self, plan: GenerationPlan, done: StepDone, shares: tuple[float, ...]
    ) -> StepCommitted:
        return StepCommitted(
            seq=0,
            at=done.at,
            run=self._run,
            step=done.step,
            generation=done.generation,
            loss=math.nan if done.loss is None else done.loss,
            grad_norm=math.nan if done.grad_norm == NOT_FINITE else done.grad_norm,
            tokens=done.tokens,
            step_s=done.step_s,
            exposed_sync_s=done.exposed_sync_s,
            samples=tuple(
                (r.replica, plan.first_sample(r.replica, done.step), r.num_samples)
                for r in plan.replicas
                if r.num_samples
            ),
            replica_step_s=shares,
        )

    def _generation_formed(
        self, plan: GenerationPlan, done: StepDone, change: Change
    ) -> GenerationFormed:
        return GenerationFormed(
            seq=0,
            at=done.at,
            run=self._run,
            generation=plan.generation,
            first_step=done.step,
            replicas=self.replica_states(plan),
            cause=change.cause,
            proposal=change.proposal,
            reconfigure_s=max(0.0, done.at - done.step_s - change.began_at),
            bytes_moved=self._moved,
        )

    # snapshot --------------------------------------------------------------------------------

    def replica_states(self, plan: GenerationPlan) -> tuple[ReplicaState, ...]:
        shares = self._replica_step_s
        if self._told_of is not plan:
            self._told_of, self._told = plan, tuple(told(replica) for replica in plan.replicas)
        return tuple(
            ReplicaState(
                replica=r.replica,
                rack=r.rack,
                mode=cast(ReplicaMode, r.mode),
                gpus=r.gpus,
                live=r.live,
                num_samples=r.num_samples,
                units=units,
                step_s=shares[r.replica] if r.replica < len(shares) else 0.0,
                boost_w=self.power.boost_w(r) if self.power else 0.0,
                boostable_failures=self.power.headroom(r) if self.power else -1,
                spares=self.spares(r.replica),
                holdings=holdings,
            )
            for r, (units, holdings) in zip(plan.replicas, self._told, strict=True)
        )

    def snapshot(self, coordinator: Coordinator, now: float) -> RunState:
        """The run's state for the dashboard."""
        config, last = self._config, self.last
        ended_at = self.ledger.marked_at if coordinator.ended else None
        until = ended_at if ended_at is not None else now
        step_s = self.expected_step_s or (last.step_s if last else 0.0)
        moving = last is not None and coordinator.phase in ("training", "entering", "leaving")
        ideal = self.ideal_step_s
        policy = coordinator.desk.policy.state(now)
        return RunState(
            run=self._run,
            name=config.name,
            status=_status(coordinator),
            status_reason=coordinator.ended.reason if coordinator.ended else _reason(coordinator),
            emulated=config.cluster.device == "emulated",
            device=config.cluster.device,
            started_at=self._started_at,
            updated_at=now,
            ended_at=ended_at,
            generation=coordinator.number,
            step=self.committed,
            seq_len=config.train.seq_len,
            global_batch=config.train.global_batch,
            num_params=num_parameters(config.model),
            replicas=self.replica_states(coordinator.plan) if coordinator.plan else (),
            ledger={k: v for k, v in self.ledger.totals(until).items() if v > 0},
            wall_s=self.ledger.wall_s(until),
            loss=last.loss if last else None,
            moved_bytes=self._moved,
            tokens_per_s=self.tokens_per_step / step_s if moving and step_s > 0 else 0.0,
            step_s=step_s,
            ideal_step_s=ideal,
            time_goodput=self.ledger.time_goodput(until),
            token_goodput=self.ledger.token_goodput(until, self.tokens_per_step / ideal)
            if ideal > 0
            else 0.0,
            policy=policy.words,
            policy_state=policy,
        )


def _status(coordinator: Coordinator) -> RunStatus:
    if coordinator.ended is not None:
        return coordinator.ended.status
    if coordinator.phase == "paused":
        return "paused"
    if coordinator.fallback.waits:
        return "waiting"
    if coordinator.progress.last is None:
        return "starting"
    return (
        "running"
        if coordinator.progress.formed and coordinator.phase != "leaving"
        else ("reconfiguring")
    )


def _reason(coordinator: Coordinator) -> str:
    if coordinator.phase == "starting":
        views = list(coordinator.fleet)
        alive = sum(view.status == "alive" for view in views)
        return f"{alive} of {len(views)} workers are up"
    if coordinator.phase == "paused":
        return coordinator.pausing.why
    if coordinator.fallback.waits:
        return coordinator.fallback.waits
    if coordinator.phase not in ("leaving", "entering", "restoring", "saving"):
        return ""
    return coordinator.change.cause if coordinator.number > 1 else "forming the first generation"


def _is_healthy(plan: GenerationPlan) -> bool:
    return all(r.mode == "training" and r.degree == len(r.gpus) for r in plan.replicas)


def _replica_shares(plan: GenerationPlan, share_s: tuple[float, ...]) -> tuple[float, ...]:
    """Slowest slot's share per replica; 0.0 for replicas that do not train."""
    shares, rank = [], 0
    for replica in plan.replicas:
        if replica.mode == "out":
            shares.append(0.0)
            continue
        own = share_s[rank : rank + replica.degree]
        rank += replica.degree
        shares.append(max(own, default=0.0) if replica.mode == "training" else 0.0)
    return tuple(shares)
