"""Opens the history's database: SQLite for one machine, PostgreSQL for production.

The single point where SQLAlchemy's errors become ours. It must not know any table.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    SQLAlchemyError,
)

from storage.settings import redact_url

_BUSY_TIMEOUT_MS = 5_000
_WAL_RETRY_S = 0.01
_CONNECT_TIMEOUT_S = 5


class HistoryRejectedError(Exception):
    """The database refused a value (out of range, a NUL in a text); trying again will not help."""


class HistoryDown(Exception):
    """The history's database cannot be used now. The message says which one and what to try."""


def open_history(url: str) -> Engine:
    """An engine for `url` (as in `Settings.database_url`); connects lazily; to be disposed of.

    Raises:
        HistoryDown: `url` is not an address of a database.
    """
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite":
            engine = create_engine(parsed, connect_args={"timeout": _BUSY_TIMEOUT_MS / 1000})
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
            return engine
        return create_engine(
            parsed,
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": _CONNECT_TIMEOUT_S,
                "application_name": "counterpoise",
            },
        )
    except (ArgumentError, NoSuchModuleError) as error:
        raise HistoryDown(f"{redact_url(url)} is not an address of a database: {error}") from error


def sqlite_file(engine: Engine) -> Path | None:
    """The database file, None for another database."""
    if engine.dialect.name != "sqlite" or not engine.url.database:
        return None
    return Path(engine.url.database)


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A connection whose reads see one moment; its errors are `HistoryDown`."""
    with translated(engine), engine.connect() as connection:
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """One transaction that holds the write lock from its start, so that nothing it read can change
    under it; committed on leaving. Errors are `HistoryDown`."""
    with (
        translated(engine),
        engine.connect().execution_options(counterpoise_immediate=True) as connection,
        connection.begin(),
    ):
        yield connection


@contextmanager
def translated(engine: Engine) -> Iterator[None]:
    """Turns SQLAlchemy's errors into `HistoryDown` and `HistoryRejectedError`."""
    try:
        yield
    except (DataError, IntegrityError, OverflowError) as error:
        cause = getattr(error, "orig", None) or error
        raise HistoryRejectedError(_first_line(cause)) from error
    except SQLAlchemyError as error:
        where = engine.url.render_as_string(hide_password=True)
        cause = error.orig if isinstance(error, DBAPIError) and error.orig else error
        raise HistoryDown(
            f"the history at {where} cannot be used: {_first_line(cause)}; "
            "check that it runs, that COUNTERPOISE_DATABASE_URL is right, that its disk has space"
        ) from error


def _first_line(error: BaseException) -> str:
    # PostgreSQL quotes the statement below it
    return str(error).strip().partition("\n")[0]


def _prepare_sqlite(connection: Any, record: object) -> None:
    # The driver would begin its own transactions, and only before writes
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    _switch_to_wal(cursor)
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _switch_to_wal(cursor: Any) -> None:
    """Readers and the writer do not block each other then. Stays with the file once switched."""
    deadline = time.monotonic() + _BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            # busy_timeout does not cover this switch, when two open a new file at once
            if time.monotonic() > deadline:
                raise
            time.sleep(_WAL_RETRY_S)


def _begin_sqlite(connection: Connection) -> None:
    # SQLite loses updates when a transaction that has read becomes a writer: take the lock first
    immediate = connection.get_execution_options().get("counterpoise_immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")
