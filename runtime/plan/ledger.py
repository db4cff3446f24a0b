"""The goodput ledger: every instant of a run's wall time belongs to exactly one bucket.

Pure: times come in as seconds since the epoch. Inside, time is whole nanoseconds since the start,
so that the buckets add up to the wall time exactly, however long a run lasts. Late or out-of-order
times are moved up to what is already attributed; nothing is ever negative or counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from runtime.errors import PlanError
from storage.records import BUCKETS, Bucket

_NS = 1_000_000_000
# A healthy step this close to the ideal is productive: the ideal is no better an estimate.
HEALTHY_TOLERANCE = 0.02


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Wall time [begin, end) of one bucket; the caller makes it a `LedgerSpent` record."""

    bucket: Bucket
    begin: float
    end: float
    tokens: int = 0


class Ledger:
    """Partitions the wall time of one run.

    While it trains, time since the last commit is the step at hand: a commit makes up to the ideal
    step time of it productive, the excess `degraded` or `waiting_for_approval`. Outside of that the
    run is in a *phase* (starting, reconfiguring, paused), which ends with the first commit.

    A step quicker than the ideal leaves a credit of at most one ideal step that later steps draw
    on, so that jitter around the ideal cancels out instead of showing up as degraded.
    """

    def __init__(self, started_at: float, *, span_s: float = 5.0) -> None:
        """Start at `started_at` in phase starting; `span_s`: longest span of mixed steps."""
        self._started_at = started_at
        self._span_ns = round(span_s * _NS)
        self._mark = 0
        self._phase: Bucket | None = "starting"
        self._totals: dict[Bucket, int] = dict.fromkeys(BUCKETS, 0)
        self._tokens = 0
        self._credit = 0
        self._stalled = 0
        self._excess: Bucket = "degraded"
        self._ideal = 0
        self._pool: dict[Bucket, int] = {}
        self._pool_tokens = 0
        self._pool_begin = 0
        self._finished: list[Span] = []

    @classmethod
    def restored(
        cls,
        started_at: float,
        totals: Mapping[Bucket, float],
        *,
        tokens: int,
        training: bool = True,
        span_s: float = 5.0,
    ) -> Ledger:
        """The ledger of a run whose spans so far add up to `totals` (seconds per bucket).

        It goes on where they end. Say `spend("unknown", at)` for time that nothing is known of;
        commits that happened meanwhile are simply reported late.

        Raises:
            PlanError: a negative total.
        """
        ledger = cls(started_at, span_s=span_s)
        for bucket, seconds in totals.items():
            if not seconds >= 0.0:
                raise PlanError(f"the ledger's bucket {bucket!r} cannot be {seconds!r} s")
            ledger._totals[bucket] = round(seconds * _NS)
        ledger._mark = ledger._pool_begin = sum(ledger._totals.values())
        ledger._tokens = tokens
        ledger._phase = None if training else "starting"
        return ledger

    @property
    def marked_at(self) -> float:
        """Up to here, time is attributed for good."""
        return self._at(self._mark)

    @property
    def tokens(self) -> int:
        """Tokens committed since the run started."""
        return self._tokens

    # what happened ----------------------------------------------------------------------------
    def committed(
        self,
        at: float,
        ideal_step_s: float,
        *,
        tokens: int,
        step_s: float | None = None,
        waiting: bool = False,
        healthy: bool = False,
        again: bool = False,
    ) -> None:
        """A step was committed.

        Args:
            ideal_step_s: step time of the fully healthy run.
            tokens: tokens of the step.
            step_s: what the step itself took; tells a phase from the first step after it. None: the
                ideal step time, or all the time since the last commit when no phase was on.
            waiting: a proposal for a dead slot waits; the excess then is the waiting's.
            again: it was committed before the run went back to a checkpoint: its time is
                recomputing, and its tokens are counted already.
            healthy: every slot trains; an excess within `HEALTHY_TOLERANCE` is then jitter.
        """
        end = self._clamped(at)
        ideal = max(0, round(ideal_step_s * _NS))
        if self._phase is not None:
            step = ideal if step_s is None else max(0, round(step_s * _NS))
            self._spend(self._phase, max(self._mark, end - step))
            self._phase = None
            self._credit = 0
        if self._stalled:
            self._spend("checkpointing", min(end, self._mark + self._stalled))
            self._stalled = 0
        if again:
            self._spend("recomputing", end)
            self._credit = 0
            return
        took = end - self._mark
        allowed = ideal + self._credit
        if healthy:
            allowed = max(allowed, round(ideal * (1.0 + HEALTHY_TOLERANCE)))
        productive = min(took, allowed)
        self._credit = min(ideal, max(0, ideal + self._credit - productive))
        self._ideal = ideal
        excess: Bucket = "waiting_for_approval" if waiting else "degraded"
        if excess != self._excess:
            self._close_pool()
            self._excess = excess
        self._tokens += tokens
        self._pool_tokens += tokens
        self._pool.setdefault("productive", 0)
        self._put("productive", productive)
        self._put(excess, took - productive)

    def failed(
        self,
        detected_at: float,
        happened_at: float,
        *,
        rolled_forward: bool = False,
        ideal_step_s: float = 0.0,
        tokens: int = 0,
    ) -> None:
        """A failure ended the generation; reconfiguring from `detected_at` to the next commit.

        What ran since the last commit until `happened_at` is a step thrown away, `recomputing`;
        from there to `detected_at` is `detecting`. A failure within a phase leaves its time to it.

        Args:
            rolled_forward: the vote found the step at hand worth keeping: it counts as committed at
                `happened_at` with `ideal_step_s` and `tokens`. Do not report it again.
        """
        happened = self._clamped(happened_at)
        if rolled_forward:
            self.committed(happened_at, ideal_step_s, tokens=tokens)
        else:
            self._spend(self._phase or "recomputing", happened)
        self._spend("detecting", self._clamped(detected_at))
        self._enter("reconfiguring")

    def reconfigured(self, at: float) -> None:
        """A planned reconfiguration began at `at`, a step boundary; it lasts to the next commit.

        Time since the last commit until `at` is counted with it: nothing trains at the boundary.
        """
        self._spend(self._phase or "reconfiguring", self._clamped(at))
        self._enter("reconfiguring")

    def paused(self, at: float) -> None:
        """Nothing can train from `at` on; lasts to the next commit, failure or reconfiguration."""
        self._spend(self._phase or "recomputing", self._clamped(at))
        self._enter("paused")

    def stopped(self, at: float) -> None:
        """The run ended at `at`; a step at hand is dropped, so its time is `recomputing`."""
        self._spend(self._phase or "recomputing", self._clamped(at))
        self._close_pool()

    def stalled(self, seconds: float) -> None:
        """The step at hand stands still for so long while its ranks copy their state.

        Ranks copy at the same time, so the longest of several words on it counts.
        """
        self._stalled = max(self._stalled, round(seconds * _NS))

    def spend(self, bucket: Bucket, until: float) -> None:
        """Attribute the time since the last mark up to `until` to `bucket` (e.g. checkpointing)."""
        self._spend(bucket, self._clamped(until))

    # what it adds up to -----------------------------------------------------------------------
    def wall_s(self, now: float) -> float:
        return self._clamped(now) / _NS

    def totals(self, now: float) -> dict[Bucket, float]:
        """Seconds per bucket from the start to `now`; they add up to `wall_s(now)`.

        Time since the mark is provisional: a step at hand counts as one that commits now.
        """
        spent = dict(self._totals)
        took = self._clamped(now) - self._mark
        if self._phase is not None:
            spent[self._phase] += took
        else:
            productive = min(took, self._ideal + self._credit)
            spent["productive"] += productive
            spent[self._excess] += took - productive
        return {bucket: nanoseconds / _NS for bucket, nanoseconds in spent.items()}

    def time_goodput(self, now: float) -> float:
        """Productive time over wall time, 0 to 1."""
        wall_s = self.wall_s(now)
        return self.totals(now)["productive"] / wall_s if wall_s > 0.0 else 0.0

    def token_goodput(self, now: float, ideal_tokens_per_s: float) -> float:
        """Committed tokens over what the healthy run would have committed in the wall time."""
        possible = ideal_tokens_per_s * self.wall_s(now)
        return self._tokens / possible if possible > 0.0 else 0.0

    def drain(self, *, everything: bool = False) -> list[Span]:
        """Spans finished since the last call: contiguous, in order, each returned once.

        Steps of up to `span_s` are pooled: their productive time comes as one span, their excess
        as one after it. Anything else ends the pool. `everything` also returns the open pool.
        """
        if everything or self._mark - self._pool_begin >= self._span_ns:
            self._close_pool()
        spans, self._finished = self._finished, []
        return spans

    # inside -----------------------------------------------------------------------------------
    def _at(self, nanoseconds: int) -> float:
        return self._started_at + nanoseconds / _NS

    def _clamped(self, at: float) -> int:
        """`at` in nanoseconds since the start, never before the mark."""
        return max(self._mark, round((at - self._started_at) * _NS))

    def _enter(self, phase: Bucket) -> None:
        self._phase = phase
        self._credit = 0

    def _put(self, bucket: Bucket, nanoseconds: int) -> None:
        """Add steps' time to the pool and move the mark."""
        if nanoseconds:
            self._pool[bucket] = self._pool.get(bucket, 0) + nanoseconds
            self._totals[bucket] += nanoseconds
            self._mark += nanoseconds

    def _spend(self, bucket: Bucket, until: int) -> None:
        """Attribute [mark, until) to `bucket`, in one span with the last if that matches."""
        if until <= self._mark:
            return
        self._close_pool()
        self._finish(bucket, self._mark, until, 0)
        self._totals[bucket] += until - self._mark
        self._mark = self._pool_begin = until

    def _close_pool(self) -> None:
        """Turn the pool into spans, productive time first; tokens go with the first of them."""
        begin, tokens = self._pool_begin, self._pool_tokens
        # Commits reported so late that no time is left for them still bring their tokens.
        pool = self._pool or ({"productive": 0} if tokens else {})
        for bucket, length in pool.items():
            self._finish(bucket, begin, begin + length, tokens)
            begin, tokens = begin + length, 0
        self._pool = {}
        self._pool_tokens = 0
        self._pool_begin = self._mark

    def _finish(self, bucket: Bucket, begin: int, end: int, tokens: int) -> None:
        span = Span(bucket=bucket, begin=self._at(begin), end=self._at(end), tokens=tokens)
        if self._finished and self._finished[-1].bucket == bucket:
            last = self._finished.pop()
            span = Span(bucket=bucket, begin=last.begin, end=span.end, tokens=last.tokens + tokens)
        self._finished.append(span)
