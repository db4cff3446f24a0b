"""The audit in the database: rows are added at the end of one chain over all runs, and verified.

Triggers refuse every change (migration v3); retention never touches it. Who can drop the triggers
can also write the chain anew: keep a head (`counterpoise audit verify`, the recorder's log)
elsewhere and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import Connection, Engine, Row, or_, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from storage.audit import AuditNote, AuditRow, Noted, chained, of_entry, of_loss, of_note
from storage.audit_records import CommandAnswered
from storage.history.database import reading, writing
from storage.history.rows import BadEntry, Gap, Recordable, which
from storage.history.tables import AUDIT, POSITIONS
from storage.records import DecisionMade

NOTES = ""
MAX_ROWS = 10_000
_CHUNK = 5_000
# Any number, the same for all who add to the chain of one PostgreSQL database
_CHAIN_LOCK = 0x636F756E7466
_COLUMNS = [field.name for field in fields(AuditRow)]
_GUARDS = {
    "sqlite": (
        "SELECT COUNT(*) FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'audit'", 3
    ),
    "postgresql": (
        "SELECT COUNT(*) FROM pg_trigger WHERE tgrelid = 'audit'::regclass AND tgenabled = 'O' "
        "AND NOT tgisinternal", 3
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What verifying found. broken: number of the first row that does not fit, None when all do;
    why says how. num_rows: that were good. head: hash of the last good one."""

    num_rows: int
    head: str
    broken: int | None = None
    why: str = ""

    @property
    def ok(self) -> bool:
        return not self.why


def append_entries(connection: Connection, run: str, items: Sequence[Recordable]) -> None:
    """Add the rows of journal entries, in the transaction that records them."""
    append(connection, [row for item in items if (row := _row_of(run, item)) is not None])


def append(connection: Connection, rows: Sequence[AuditRow]) -> None:
    """Add rows at the end of the chain; whoever else adds waits for this transaction's end."""
    if not rows:
        return
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _CHAIN_LOCK})
    last = connection.execute(
        select(AUDIT.c.number, AUDIT.c.hash).order_by(AUDIT.c.number.desc()).limit(1)
    ).one_or_none()
    number, head = (0, "") if last is None else (last.number, last.hash)
    links = [asdict(link) for link in chained(rows, number, head)]
    # One by one: the trigger looks at the row before
    for link in links:
        connection.execute(AUDIT.insert(), link)


def record_notes(
    engine: Engine,
    notes: Sequence[tuple[int, float, AuditNote | str]],
    now: float,
    is_genuine: Callable[[Noted, str], bool],
) -> None:
    """Add notes with their positions, ascending, and times; those up to the recorded position are
    ignored. A text stands for a note that does not decode.

    Raises:
        HistoryDown: nothing was written; try again later.
    """
    with writing(engine) as connection:
        position = _locked_position(connection, now)
        fresh = [one for one in notes if one[0] > position]
        if not fresh:
            return
        append(
            connection,
            [
                of_loss(NOTES, place, at, note)
                if isinstance(note, str)
                else of_note(note, place, at, is_genuine)
                for place, at, note in fresh
            ],
        )
        connection.execute(
            update(POSITIONS)
            .where(POSITIONS.c.run == NOTES)
            .values(seq=fresh[-1][0], recorded_at=now)
        )


def notes_position(engine: Engine) -> int:
    """Position up to which notes are recorded."""
    with reading(engine) as connection:
        found = connection.scalar(select(POSITIONS.c.seq).where(POSITIONS.c.run == NOTES))
    return int(found or 0)


def verify(engine: Engine, expect: tuple[int, str] | None = None) -> Verified:
    """Walk the whole chain. expect: number and hash of a head that was noted earlier.

    Raises:
        HistoryDown: the database cannot be used.
    """
    number, head = 0, ""
    with reading(engine) as connection:
        while rows := _chunk(connection, number):
            for row in rows:
                if why := _misfit(row, number, head):
                    return Verified(num_rows=number, head=head, broken=row.number, why=why)
                number, head = row.number, row.hash
                if expect is not None and number == expect[0] and head != expect[1]:
                    why = "it is not the row that was noted: the chain was written anew"
                    return Verified(num_rows=number, head=head, broken=number, why=why)
        statement, wanted = _GUARDS[engine.dialect.name]
        guards = connection.scalar(text(statement))
    why = ""
    if expect is not None and number < expect[0]:
        why = f"it ends before row {expect[0]}, which was noted: rows were cut off at the end"
    elif guards != wanted:
        why = "the triggers that refuse changes are not all there"
    return Verified(num_rows=number, head=head, why=why)


def head(engine: Engine) -> tuple[int, str]:
    """Number and hash of the last row, to be kept elsewhere."""
    query = select(AUDIT.c.number, AUDIT.c.hash).order_by(AUDIT.c.number.desc()).limit(1)
    with reading(engine) as connection:
        last = connection.execute(query).one_or_none()
    return (0, "") if last is None else (last.number, last.hash)


def list_audit(
    engine: Engine, *, run: str = "", search: str = "", limit: int = 200
) -> list[AuditRow]:
    """Newest first. run: of this one only. search: in who, role, what, reason or result."""
    query = select(AUDIT).order_by(AUDIT.c.number.desc()).limit(max(1, min(limit, MAX_ROWS)))
    if run:
        query = query.where(AUDIT.c.run == run)
    if search:
        columns = (AUDIT.c[name] for name in ("who", "role", "what", "reason", "result", "run"))
        query = query.where(or_(*(one.icontains(search, autoescape=True) for one in columns)))
    with reading(engine) as connection:
        return [_of_row(row) for row in connection.execute(query)]


def _row_of(run: str, item: Recordable) -> AuditRow | None:
    match item:
        case CommandAnswered() | DecisionMade():
            return of_entry(item)
        case Gap():
            return of_loss(run, item.begin, item.at, which(item))
        case BadEntry():
            return of_loss(run, item.seq, item.at, f"entry {item.seq}: {item.error}")
    return None


def _locked_position(connection: Connection, now: float) -> int:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    connection.execute(
        dialect.insert(POSITIONS).on_conflict_do_nothing(),
        {"run": NOTES, "seq": 0, "recorded_at": now},
    )
    row = select(POSITIONS.c.seq).where(POSITIONS.c.run == NOTES).with_for_update()
    return int(connection.scalar(row) or 0)


def _chunk(connection: Connection, after: int) -> list[AuditRow]:
    query = select(AUDIT).where(AUDIT.c.number > after).order_by(AUDIT.c.number).limit(_CHUNK)
    return [_of_row(row) for row in connection.execute(query)]


def _misfit(row: AuditRow, before: int, head: str) -> str:
    if row.number != before + 1:
        return f"row {before + 1} is missing"
    if row.previous != head:
        return "it does not follow from the row before it"
    return "" if row.hash == row.digest() else "its hash does not fit what it says"


def _of_row(row: Row[Any]) -> AuditRow:
    return AuditRow(**{name: getattr(row, name) for name in _COLUMNS})
