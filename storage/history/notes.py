"""Notes and tags that people give to runs: all that the app itself writes into the history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Table, delete, select
from sqlalchemy.dialects import postgresql, sqlite

from storage.history.database import reading, writing
from storage.history.tables import NOTES, TAGS

MAX_NOTES = 200
MAX_TEXT = 2_000
MAX_TAGS = 20
MAX_TAG = 40


@dataclass(frozen=True, kw_only=True)
class Note:
    id: str
    at: float
    who: str
    text: str


def notes_of(engine: Engine, run: str) -> list[Note]:
    """Newest first, at most `MAX_NOTES`.

    Raises:
        HistoryDown: the database cannot be used (so for all functions here).
    """
    query = select(NOTES).where(NOTES.c.run == run).order_by(NOTES.c.at.desc(), NOTES.c.id)
    with reading(engine) as connection:
        rows = connection.execute(query.limit(MAX_NOTES)).all()
    return [Note(id=row.id, at=row.at, who=row.who, text=row.text) for row in rows]


def add_note(engine: Engine, run: str, note: Note) -> None:
    """Keep a note; the same id again changes nothing. Longer than `MAX_TEXT` is cut."""
    row = {"run": run, "id": note.id, "at": note.at, "who": note.who, "text": note.text[:MAX_TEXT]}
    with writing(engine) as connection:
        _add(connection, NOTES, [row])


def tags_of(engine: Engine, run: str) -> list[str]:
    query = select(TAGS.c.tag).where(TAGS.c.run == run).order_by(TAGS.c.tag)
    with reading(engine) as connection:
        return list(connection.scalars(query))


def all_tags(engine: Engine) -> list[str]:
    """Every tag in use, at most 200."""
    with reading(engine) as connection:
        return list(
            connection.scalars(select(TAGS.c.tag).distinct().order_by(TAGS.c.tag).limit(200))
        )


def set_tags(engine: Engine, run: str, tags: list[str], *, who: str, at: float) -> None:
    """Replace the tags of a run. Blank ones are left out, long ones cut; at most `MAX_TAGS`."""
    wanted = [tag.strip()[:MAX_TAG] for tag in tags if tag.strip()][:MAX_TAGS]
    with writing(engine) as connection:
        gone = (TAGS.c.run == run) & TAGS.c.tag.not_in(wanted)
        connection.execute(delete(TAGS).where(gone))
        rows = [{"run": run, "tag": tag, "at": at, "who": who} for tag in wanted]
        if rows:
            _add(connection, TAGS, rows)


def _add(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    connection.execute(dialect.insert(table).on_conflict_do_nothing(), rows)
