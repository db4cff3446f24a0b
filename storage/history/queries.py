"""What the app and the command line ask of the history. Every answer is bounded.

Returns records and small frozen dataclasses, never rows; writes nothing. A run whose controller
died without a word is shown by its last entry: `status` "silent" after `SILENT_S` without one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Connection, Engine, Table, and_, func, not_, or_, select

from storage.history.database import open_history, reading
from storage.history.incident_costs import Pace
from storage.history.rollups import SPANS_S
from storage.history.schema import SchemaState, schema_state
from storage.history.series import StepSeries, series
from storage.history.tables import (
    DECISIONS,
    EVENTS,
    GENERATIONS,
    LEDGER,
    LEDGER_TOTALS,
    PROPOSALS,
    ROLLUPS,
    RUNS,
    STEPS,
    TAGS,
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
MAX_EXPORT = 1_000_000
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
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunDetail(RunSummary):
    """One run with what it ran on. config: the resolved configuration as JSON text."""

    config: str
    seq_len: int
    global_batch: int
    num_params: int


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

    @property
    def engine(self) -> Engine:
        """For `storage.history.notes`."""
        return self._engine

    def schema_state(self) -> SchemaState:
        """Whether the tables are there and of this version; ask before anything else."""
        return schema_state(self._engine)

    def list_runs(
        self,
        limit: int = 100,
        search: str = "",
        *,
        statuses: Sequence[str] = (),
        since: float = 0.0,
        tag: str = "",
    ) -> list[RunSummary]:
        """Newest first; `search` is looked for in name, id and tags, whatever its case.

        statuses: any of these ("silent" too); () all. since: started at or after. tag: has it.
        """
        query = select(RUNS).order_by(RUNS.c.started_at.desc(), RUNS.c.run.desc())
        if search:
            tagged = select(TAGS.c.run).where(TAGS.c.tag.icontains(search, autoescape=True))
            found: list[ColumnElement[bool]] = [
                column.icontains(search, autoescape=True) for column in (RUNS.c.name, RUNS.c.run)
            ]
            query = query.where(or_(*found, RUNS.c.run.in_(tagged)))
        if statuses:
            query = query.where(self._has_status(statuses))
        if since > 0:
            query = query.where(RUNS.c.started_at >= since)
        if tag:
            query = query.where(RUNS.c.run.in_(select(TAGS.c.run).where(TAGS.c.tag == tag)))
        with reading(self._engine) as connection:
            rows = connection.execute(query.limit(_bounded(limit))).all()
            runs = [row.run for row in rows]
            totals, tags = _totals(connection, runs), _tags(connection, runs)
        return [
            RunSummary(**self._summary(row, totals[row.run]), tags=tuple(tags[row.run]))
            for row in rows
        ]

    def _has_status(self, statuses: Sequence[str]) -> ColumnElement[bool]:
        silent = and_(RUNS.c.ended_at.is_(None), RUNS.c.last_at < self._clock() - SILENT_S)
        written = and_(RUNS.c.status.in_(statuses), not_(silent))
        return or_(written, silent) if "silent" in statuses else written

    def run(self, run_id: str) -> RunDetail | None:
        """One run, None when the history does not know it."""
        with reading(self._engine) as connection:
            row = connection.execute(select(RUNS).where(RUNS.c.run == run_id)).one_or_none()
            totals, tags = _totals(connection, [run_id]), _tags(connection, [run_id])
        if row is None:
            return None
        return RunDetail(
            **self._summary(row, totals[run_id]),
            tags=tuple(tags[run_id]),
            config=row.config,
            seq_len=row.seq_len,
            global_batch=row.global_batch,
            num_params=row.num_params,
        )

    def steps(self, run_id: str, max_points: int = 2000) -> StepSeries:
        """The steps of a run for a chart, at most `max_points` of them, evenly spread; of long runs
        the means of minutes or hours."""
        with reading(self._engine) as connection:
            return series(connection, run_id, max(2, min(max_points, MAX_ROWS)))

    def step_columns(self, run_id: str, limit: int = MAX_EXPORT) -> dict[str, list[Any]]:
        """Column name -> value per step, the newest `limit` steps that are still kept one by one,
        ascending (for export)."""
        query = select(STEPS).where(STEPS.c.run == run_id).order_by(STEPS.c.step.desc())
        with reading(self._engine) as connection:
            result = connection.execute(query.limit(min(limit, MAX_EXPORT)))
            names = list(result.keys())
            columns = list(zip(*result.all(), strict=True)) or [()] * len(names)
        return {name: list(reversed(column)) for name, column in zip(names, columns, strict=True)}

    def paces(self, run_id: str) -> dict[int, Pace]:
        """Generation -> what it committed, from the sums per hour."""
        sums = [func.sum(ROLLUPS.c[name]) for name in ("num_steps", "tokens", "step_s")]
        mine = (ROLLUPS.c.run == run_id) & (ROLLUPS.c.span_s == SPANS_S[-1])
        query = select(ROLLUPS.c.generation, *sums).where(mine).group_by(ROLLUPS.c.generation)
        with reading(self._engine) as connection:
            rows = connection.execute(query).all()
        return {
            number: Pace(num_steps=int(steps), tokens=int(tokens), step_s=float(step_s))
            for number, steps, tokens, step_s in rows
        }

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

    def ledger_intervals(
        self,
        run_id: str,
        limit: int = MAX_ROWS,
        *,
        within: tuple[float, float] | None = None,
    ) -> list[LedgerSpent]:
        """The intervals of the ledger, oldest first (of more than `limit`, the newest). within:
        only those that touch [begin, end]."""
        touches: list[ColumnElement[bool]] = []
        if within is not None:
            touches = [LEDGER.c.end_at >= within[0], LEDGER.c.begin_at <= within[1]]
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
            for row in self._newest(LEDGER, run_id, limit, *touches)
        ]

    def _newest(
        self, table: Table, run_id: str, limit: int, *also: ColumnElement[bool]
    ) -> list[Any]:
        query = select(table).where(table.c.run == run_id, *also).order_by(table.c.seq.desc())
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


def _tags(connection: Connection, runs: Sequence[str]) -> dict[str, list[str]]:
    tags: dict[str, list[str]] = defaultdict(list)
    for row in connection.execute(select(TAGS).where(TAGS.c.run.in_(runs)).order_by(TAGS.c.tag)):
        tags[row.run].append(row.tag)
    return tags


def _spent(totals: dict[str, tuple[float, int]]) -> dict[str, float]:
    return {bucket: totals.get(bucket, (0.0, 0))[0] for bucket in BUCKETS}


def _record(row: Any, kind: type[T]) -> T:
    return kind(**row._asdict())


def _event(row: Any) -> EventHappened:
    fields = row._asdict()
    return EventHappened(**(fields | {"details": msgspec.json.decode(fields["details"])}))
