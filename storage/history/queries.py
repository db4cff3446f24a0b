"""What the app and the command line ask of the history. Every answer is bounded.

Returns records and small frozen dataclasses, never rows; writes nothing. A run whose controller
died without a word is shown by its last entry: `status` "silent" after `SILENT_S` without one.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, Connection, Engine, Table, and_, func, or_, select

from storage.history.database import open_history, reading
from storage.history.schema import SchemaState, schema_state
from storage.history.tables import (
    DECISIONS,
    EVENTS,
    GENERATIONS,
    LEDGER,
    LEDGER_TOTALS,
    PROPOSALS,
    RUNS,
    STEPS,
)
from storage.records import (
    BUCKETS,
    DecisionMade,
    EventHappened,
    GenerationFormed,
    LedgerSpent,
    Proposal,
    decode_packed,
)

SILENT_S = 120.0
MAX_ROWS = 10_000
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run in a list.

    status: a `RunStatus`, or "silent" (no end recorded, nothing heard for `SILENT_S`). wall_s: from
    start to end, or to the last entry. ledger: bucket -> seconds, all buckets. time_goodput:
    productive over wall time. token_goodput: committed tokens over what the rate of the productive
    time would have given in the wall time; None while that rate is unknown. last_loss: None when
    there is none, or it was not a number.
    """

    run: str
    name: str
    status: str
    status_reason: str
    emulated: bool
    device: str
    started_at: float
    ended_at: float | None
    last_at: float
    wall_s: float
    steps: int
    last_step: int | None
    last_loss: float | None
    tokens: int
    num_generations: int
    num_bad_records: int
    num_missing: int
    ledger: dict[str, float]
    time_goodput: float | None
    token_goodput: float | None


@dataclass(frozen=True, kw_only=True)
class RunDetail(RunSummary):
    """One run with what it ran on. config: the resolved configuration as JSON text."""

    config: str
    seq_len: int
    global_batch: int
    num_params: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSeries:
    """Columns over the steps of a run, ascending, thinned to a bounded number of points; the first
    and the last step are always there. NaN where a value was not a number."""

    step: npt.NDArray[np.int64]
    at: npt.NDArray[np.float64]
    loss: npt.NDArray[np.float64]
    tokens_per_s: npt.NDArray[np.float64]
    step_s: npt.NDArray[np.float64]
    grad_norm: npt.NDArray[np.float64]
    generation: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.step)


class History:
    """Reads the history; every method raises `HistoryDown` when the database cannot be used.

    Args:
        engine: from `storage.history.database.open_history`.
        clock: epoch seconds, to tell a silent run.
    """

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._clock = clock

    @classmethod
    def open(cls, url: str) -> History:
        """The history at `url` (as in `Settings.database_url`); connects lazily."""
        return cls(open_history(url))

    def close(self) -> None:
        """Give up the connections."""
        self._engine.dispose()

    def schema_state(self) -> SchemaState:
        """Whether the tables are there and of this version; ask before anything else."""
        return schema_state(self._engine)

    def list_runs(self, limit: int = 100, search: str = "") -> list[RunSummary]:
        """Newest first; `search` is looked for in name and id, whatever its case."""
        query = select(RUNS).order_by(RUNS.c.started_at.desc(), RUNS.c.run.desc())
        if search:
            found: list[ColumnElement[bool]] = [
                column.icontains(search, autoescape=True) for column in (RUNS.c.name, RUNS.c.run)
            ]
            query = query.where(or_(*found))
        with reading(self._engine) as connection:
            rows = connection.execute(query.limit(_bounded(limit))).all()
            totals = _totals(connection, [row.run for row in rows])
        return [RunSummary(**self._summary(row, totals[row.run])) for row in rows]

    def run(self, run_id: str) -> RunDetail | None:
        """One run, None when the history does not know it."""
        with reading(self._engine) as connection:
            row = connection.execute(select(RUNS).where(RUNS.c.run == run_id)).one_or_none()
            totals = _totals(connection, [run_id])
        if row is None:
            return None
        return RunDetail(
            **self._summary(row, totals[run_id]),
            config=row.config,
            seq_len=row.seq_len,
            global_batch=row.global_batch,
            num_params=row.num_params,
        )

    def steps(self, run_id: str, max_points: int = 2000) -> StepSeries:
        """The steps of a run for a chart, at most `max_points` of them, evenly spread."""
        with reading(self._engine) as connection:
            return _series(connection, run_id, max(2, min(max_points, MAX_ROWS)))

    def generations(self, run_id: str, limit: int = MAX_ROWS) -> list[GenerationFormed]:
        """The generations of a run, oldest first (of more than `limit`, the newest)."""
        rows = self._newest(GENERATIONS, run_id, limit)
        return [decode_packed(row.body, GenerationFormed) for row in rows]

    def events(self, run_id: str, limit: int = 500) -> list[EventHappened]:
        """The events of a run, oldest first (of more than `limit`, the newest)."""
        return [_event(row) for row in self._newest(EVENTS, run_id, limit)]

    def proposals(self, run_id: str, limit: int = 500) -> list[Proposal]:
        """The proposals of a run as they stood last, oldest first (of more, the newest)."""
        last = (
            select(PROPOSALS.c.id, func.max(PROPOSALS.c.revision).label("revision"))
            .where(PROPOSALS.c.run == run_id)
            .group_by(PROPOSALS.c.id)
            .subquery()
        )
        is_last = and_(PROPOSALS.c.id == last.c.id, PROPOSALS.c.revision == last.c.revision)
        query = (
            select(PROPOSALS.c.body)
            .join(last, is_last)
            .where(PROPOSALS.c.run == run_id)
            .order_by(PROPOSALS.c.seq.desc())
            .limit(_bounded(limit))
        )
        with reading(self._engine) as connection:
            bodies = connection.scalars(query).all()
        # A revision sent twice is one proposal
        found = {p.id: p for p in (decode_packed(body, Proposal) for body in reversed(bodies))}
        return sorted(found.values(), key=lambda proposal: (proposal.created_at, proposal.id))

    def decisions(self, run_id: str, limit: int = 500) -> list[DecisionMade]:
        """The decisions of a run, oldest first, each command id once (of more, the newest)."""
        rows = self._newest(DECISIONS, run_id, limit)
        found: dict[str, DecisionMade] = {}
        for row in rows:
            found.setdefault(row.id, _record(row, DecisionMade))
        return list(found.values())

    def ledger(self, run_id: str) -> dict[str, float]:
        """Bucket -> seconds, all buckets; adds up to the run's wall time as far as recorded."""
        with reading(self._engine) as connection:
            return _spent(_totals(connection, [run_id])[run_id])

    def ledger_intervals(self, run_id: str, limit: int = MAX_ROWS) -> list[LedgerSpent]:
        """The intervals of the ledger, oldest first (of more than `limit`, the newest)."""
        return [
            LedgerSpent(
                seq=row.seq,
                at=row.at,
                run=row.run,
                bucket=row.bucket,
                begin=row.begin_at,
                end=row.end_at,
                tokens=row.tokens,
            )
            for row in self._newest(LEDGER, run_id, limit)
        ]

    def _newest(self, table: Table, run_id: str, limit: int) -> list[Any]:
        query = select(table).where(table.c.run == run_id).order_by(table.c.seq.desc())
        with reading(self._engine) as connection:
            rows = connection.execute(query.limit(_bounded(limit))).all()
        return list(reversed(rows))

    def _summary(self, row: Any, totals: dict[str, tuple[float, int]]) -> dict[str, Any]:
        """The fields of a `RunSummary`."""
        status, reason = row.status, row.status_reason
        if row.ended_at is None and self._clock() - row.last_at > SILENT_S:
            status = "silent"
            reason = "No end was recorded: its controller died, or its journal has not arrived yet."
        end = row.last_at if row.ended_at is None else row.ended_at
        wall_s = max(0.0, end - row.started_at)
        productive_s, productive_tokens = totals.get("productive", (0.0, 0))
        rate = productive_tokens / productive_s if productive_s > 0 else 0.0
        copied = {
            name: getattr(row, name) for name in RunSummary.__dataclass_fields__ if name in RUNS.c
        }
        return copied | {
            "status": status,
            "status_reason": reason,
            "steps": row.num_steps,
            "wall_s": wall_s,
            "ledger": _spent(totals),
            "time_goodput": min(1.0, productive_s / wall_s) if totals and wall_s > 0 else None,
            "token_goodput": row.tokens / (rate * wall_s) if rate > 0 and wall_s > 0 else None,
        }


def _bounded(limit: int) -> int:
    return max(0, min(limit, MAX_ROWS))


def _totals(connection: Connection, runs: Sequence[str]) -> dict[str, dict[str, tuple[float, int]]]:
    """Run -> bucket -> (seconds, tokens)."""
    totals: dict[str, dict[str, tuple[float, int]]] = defaultdict(dict)
    for row in connection.execute(select(LEDGER_TOTALS).where(LEDGER_TOTALS.c.run.in_(runs))):
        totals[row.run][row.bucket] = (row.spent_s, row.tokens)
    return totals


def _spent(totals: dict[str, tuple[float, int]]) -> dict[str, float]:
    return {bucket: totals.get(bucket, (0.0, 0))[0] for bucket in BUCKETS}


def _series(connection: Connection, run_id: str, max_points: int) -> StepSeries:
    mine = STEPS.c.run == run_id
    num_steps = connection.scalar(select(func.count()).select_from(STEPS).where(mine)) or 0
    names = ("step", "at", "loss", "tokens", "step_s", "grad_norm", "generation")
    columns = [STEPS.c[name] for name in names]
    query = select(*columns).where(mine).order_by(STEPS.c.step)
    if num_steps > max_points:
        # By position, not by number: thinned history has holes. One point is for the last step.
        stride = math.ceil((num_steps - 1) / (max_points - 1))
        index = (func.row_number().over(order_by=STEPS.c.step) - 1).label("position")
        numbered = select(*columns, index).where(mine).subquery()
        kept = or_(numbered.c.position % stride == 0, numbered.c.position == num_steps - 1)
        query = select(*(numbered.c[name] for name in names)).where(kept).order_by(numbered.c.step)
    found = list(zip(*connection.execute(query).all(), strict=True)) or [()] * len(names)
    column = dict(zip(names, found, strict=True))
    step_s = _floats(column["step_s"])
    with np.errstate(divide="ignore", invalid="ignore"):
        tokens_per_s = np.where(step_s > 0, _floats(column["tokens"]) / step_s, np.nan)
    return StepSeries(
        step=np.array(column["step"], dtype=np.int64),
        at=_floats(column["at"]),
        loss=_floats(column["loss"]),
        tokens_per_s=tokens_per_s,
        step_s=step_s,
        grad_norm=_floats(column["grad_norm"]),
        generation=np.array(column["generation"], dtype=np.int64),
    )


def _floats(values: Sequence[float | None]) -> npt.NDArray[np.float64]:
    # NULL, which is None here, becomes NaN
    return np.array(values, dtype=np.float64)


def _record(row: Any, kind: type[T]) -> T:
    return kind(**row._asdict())


def _event(row: Any) -> EventHappened:
    fields = row._asdict()
    return EventHappened(**(fields | {"details": msgspec.json.decode(fields["details"])}))
