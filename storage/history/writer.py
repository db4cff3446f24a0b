"""Writes journal entries into the history: rows and the position they reach, in one transaction.

At least once outside, exactly once inside: entries up to the position are ignored, rows are keyed
so that inserting them again changes nothing. Must not know where the entries come from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Engine, Table, select, update
from sqlalchemy.dialects import postgresql, sqlite

from storage.history.audit import append_entries
from storage.history.database import HistoryRejectedError, reading, writing
from storage.history.rollback import between_rollbacks, supersede
from storage.history.rollups import known_steps, roll_up
from storage.history.rows import BadEntry, Gap, Recordable, Row, number, rows_of
from storage.history.tables import LEDGER_TOTALS, POSITIONS, RUNS, STEPS
from storage.records import (
    EventHappened,
    GenerationFormed,
    JournalEntry,
    LedgerSpent,
    RunEnded,
    RunRolledBack,
    RunStarted,
    StepCommitted,
    encode_packed,
)

_COPIED = ("name", "emulated", "device", "config", "seq_len", "global_batch", "num_params")


class HistoryWriter:
    """The only writer of journal entries; see `Recorder` for who calls it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def position(self, run: str) -> int:
        """Seq up to which the run's journal is recorded, 0 for an unknown run."""
        with reading(self._engine) as connection:
            found = connection.scalar(select(POSITIONS.c.seq).where(POSITIONS.c.run == run))
        return int(found or 0)

    def write(self, run: str, entries: Sequence[JournalEntry | BadEntry], now: float) -> int:
        """Record entries with ascending seq; returns the new position.

        An entry that the database refuses is set aside as a bad record; what is missing between
        the position and the first entry, or between two, becomes an event.

        Raises:
            HistoryDown: nothing was written; write the same again later.
        """
        try:
            return self._write(run, entries, now)
        except HistoryRejectedError:
            # One of them is to blame: find it, one transaction each
            position = self.position(run)
            for entry in entries:
                try:
                    position = self._write(run, [entry], now)
                except HistoryRejectedError as error:
                    position = self._write(run, [_rejected(entry, error, now)], now)
            return position

    def _write(self, run: str, entries: Sequence[JournalEntry | BadEntry], now: float) -> int:
        with writing(self._engine) as connection:
            position = _locked_position(connection, run, now)
            fresh = [entry for entry in entries if entry.seq > position]
            if not fresh:
                return position
            _ensure_run(connection, run, fresh[0])
            for part in between_rollbacks(_with_gaps(fresh, position, now)):
                _write_part(connection, run, part)
            _spend(connection, run, fresh)
            position = fresh[-1].seq
            connection.execute(
                update(POSITIONS)
                .where(POSITIONS.c.run == run)
                .values(seq=position, recorded_at=now)
            )
            return position


def _write_part(connection: Connection, run: str, items: Sequence[Recordable]) -> None:
    """Write what may go back to a checkpoint with its first item, but with no other."""
    first = items[0]
    if isinstance(first, RunRolledBack):
        supersede(connection, run, first)
    rows = rows_of(run, items)
    steps = rows.get(STEPS, [])
    known = known_steps(connection, run, steps)
    roll_up(connection, run, steps, known)
    for table, found in rows.items():
        _insert(connection, table, found)
    append_entries(connection, run, items)
    _summarise(connection, run, items, [row for row in steps if row["step"] not in known])


def _insert_into(connection: Connection, table: Table) -> Any:
    """INSERT with ON CONFLICT, which both databases have but SQLAlchemy only per dialect."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    return dialect.insert(table)


def _insert(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    statement = _insert_into(connection, table)
    if table is STEPS:
        values = {
            column.name: statement.excluded[column.name]
            for column in table.c
            if column.name not in ("run", "step")
        }
        statement = statement.on_conflict_do_update(
            index_elements=["run", "step"],
            set_=values,
            where=statement.excluded.seq > table.c.seq,
        )
    else:
        statement = statement.on_conflict_do_nothing()
    connection.execute(statement, list(rows))


def _locked_position(connection: Connection, run: str, now: float) -> int:
    """The position, with its row locked: a second recorder waits here, then finds it moved."""
    connection.execute(
        _insert_into(connection, POSITIONS).on_conflict_do_nothing(),
        {"run": run, "seq": 0, "recorded_at": now},
    )
    row = select(POSITIONS.c.seq).where(POSITIONS.c.run == run).with_for_update()
    return int(connection.scalar(row) or 0)


def _with_gaps(
    fresh: Sequence[JournalEntry | BadEntry], position: int, now: float
) -> list[Recordable]:
    items: list[Recordable] = []
    for entry in fresh:
        if entry.seq > position + 1:
            items.append(Gap(begin=position + 1, end=entry.seq, at=now))
        items.append(entry)
        position = entry.seq
    return items


def _ensure_run(connection: Connection, run: str, first: JournalEntry | BadEntry) -> None:
    """A row for the run, also when its `RunStarted` was lost."""
    placeholder = {
        "run": run,
        "name": run,
        "status": "starting",
        "status_reason": "",
        "emulated": False,
        "device": "",
        "started_at": first.at,
        "last_at": first.at,
        "config": "",
        "seq_len": 0,
        "global_batch": 0,
        "num_params": 0,
        "num_steps": 0,
        "tokens": 0,
        "num_generations": 0,
        "num_bad_records": 0,
        "num_missing": 0,
    }
    connection.execute(_insert_into(connection, RUNS).on_conflict_do_nothing(), placeholder)


def _spend(connection: Connection, run: str, fresh: Sequence[JournalEntry | BadEntry]) -> None:
    spent_s: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)
    for entry in fresh:
        if isinstance(entry, LedgerSpent):
            spent_s[entry.bucket] += entry.end - entry.begin
            tokens[entry.bucket] += entry.tokens
    statement = _insert_into(connection, LEDGER_TOTALS)
    statement = statement.on_conflict_do_update(
        index_elements=["run", "bucket"],
        set_={
            "spent_s": LEDGER_TOTALS.c.spent_s + statement.excluded.spent_s,
            "tokens": LEDGER_TOTALS.c.tokens + statement.excluded.tokens,
        },
    )
    for bucket, seconds in spent_s.items():
        row = {"run": run, "bucket": bucket, "spent_s": seconds, "tokens": tokens[bucket]}
        connection.execute(statement, row)


def _summarise(
    connection: Connection, run: str, items: Sequence[Recordable], new_steps: Sequence[Row]
) -> None:
    """Bring the run's row up to date with what was just written."""
    row = connection.execute(select(RUNS).where(RUNS.c.run == run)).one()._asdict()
    for item in items:
        if not isinstance(item, BadEntry | Gap):
            # Those carry the time they were found at, which may be days later
            row["last_at"] = max(row["last_at"], item.at)
        match item:
            case RunStarted():
                row |= {name: getattr(item, name) for name in _COPIED}
                row |= {"status": "starting", "status_reason": "", "ended_at": None}
                row["started_at"] = min(row["started_at"], item.at)
            case RunEnded():
                row |= {"status": item.status, "status_reason": item.reason, "ended_at": item.at}
            case EventHappened(kind="run_paused"):
                row |= {"status": "paused", "status_reason": item.message}
            case StepCommitted():
                if row["status"] in ("starting", "paused"):
                    row |= {"status": "running", "status_reason": ""}
                if row["last_step"] is None or item.step >= row["last_step"]:
                    row |= {"last_step": item.step, "last_loss": number(item.loss)}
            case GenerationFormed():
                row["num_generations"] += 1
            case BadEntry():
                row["num_bad_records"] += 1
            case Gap():
                row["num_missing"] += item.end - item.begin
    row["num_steps"] += len(new_steps)
    row["tokens"] += sum(step["tokens"] for step in new_steps)
    connection.execute(update(RUNS).where(RUNS.c.run == run).values(row))


def _rejected(entry: JournalEntry | BadEntry, error: HistoryRejectedError, now: float) -> BadEntry:
    body = entry.body if isinstance(entry, BadEntry) else encode_packed(entry)
    # The error may quote what the database cannot store
    words = str(error).replace("\0", "\\0").encode("utf-8", "replace").decode()
    return BadEntry(seq=entry.seq, at=now, error=words[:1000], body=body)
