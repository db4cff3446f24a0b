"""The version of the history's schema: what there is, what this program needs, how to get there.

`upgrade` is for the daemons; the app only looks (`schema_state`) and says what it found.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from typing import Literal

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

from storage.history.database import HistoryDown, reading, sqlite_file, writing

# Any number, the same for all who migrate one PostgreSQL database
_MIGRATION_LOCK = 0x636F756E7465


class HistorySchemaError(Exception):
    """The database has a schema that this program cannot use; says what to do."""


@dataclass(frozen=True, kw_only=True)
class SchemaState:
    """What the database holds. message is empty when it is ready."""

    state: Literal["ready", "missing", "old", "new"]
    found: str
    expected: str
    message: str


def schema_state(engine: Engine) -> SchemaState:
    """Compare the database with what this program needs; creates nothing.

    Raises:
        HistoryDown: the database cannot be used.
    """
    file = sqlite_file(engine)
    found = ""
    if file is None or file.is_file():
        with reading(engine) as connection:
            found = _found(connection)
    return _compare(found)


def upgrade(engine: Engine) -> None:
    """Bring the schema to what this program needs; several may call it at once.

    Raises:
        HistorySchemaError: the database was written by a newer version.
        HistoryDown: the database cannot be used.
    """
    with writing(engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(
                text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK}
            )
        state = _compare(_found(connection))
        if state.state == "new":
            raise HistorySchemaError(state.message)
        if state.state == "ready":
            return
        with as_file(files("storage.history") / "migrations") as folder:
            config = Config()
            config.set_main_option("script_location", str(folder).replace("%", "%%"))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


@cache
def _revisions() -> tuple[str, ...]:
    """All revisions this program knows, oldest first."""
    with as_file(files("storage.history") / "migrations") as folder:
        script = ScriptDirectory(str(folder))
        return tuple(revision.revision for revision in script.walk_revisions())[::-1]


def _found(connection: Connection) -> str:
    return MigrationContext.configure(connection).get_current_revision() or ""


def _compare(found: str) -> SchemaState:
    known = _revisions()
    expected = known[-1]
    if found == expected:
        return SchemaState(state="ready", found=found, expected=expected, message="")
    if not found:
        return SchemaState(
            state="missing",
            found=found,
            expected=expected,
            message="There is no history yet: the recorder creates it when it starts "
            "(`counterpoise recorder`, or `counterpoise up`).",
        )
    if found in known:
        return SchemaState(
            state="old",
            found=found,
            expected=expected,
            message=f"The history has schema {found}, this version needs {expected}: "
            "restart the recorder, which upgrades it.",
        )
    return SchemaState(
        state="new",
        found=found,
        expected=expected,
        message=f"The history has schema {found}, which this version (up to {expected}) does not "
        "know: a newer Counterpoise wrote it. Install that version here as well.",
    )


__all__ = ["HistoryDown", "HistorySchemaError", "SchemaState", "schema_state", "upgrade"]
