"""One recorder per history: a file lock beside SQLite, an advisory lock in PostgreSQL.

Both vanish with the process that holds them. It spares two recorders from fighting; that nothing is
recorded twice does not rest on it (see `HistoryWriter`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from types import TracebackType

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from storage.history.database import HistoryDown, sqlite_file, translated

# Any number, the same for all recorders of one PostgreSQL database
_LOCK = 0x636F756E7472
_RETRY_S = 0.5
_LOG = logging.getLogger(__name__)


class RecorderLock:
    """Held by at most one recorder; a context manager that lets go at the end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._file: int | None = None
        self._connection: Connection | None = None

    def hold(self, stop: threading.Event) -> bool:
        """Return True once this process holds the lock; False when `stop` came first.

        Raises:
            HistoryDown: the database is away.
        """
        said = False
        while not stop.is_set():
            if self._try():
                if said:
                    _LOG.warning("the other recorder has gone, this one takes over")
                return True
            if not said:
                said = True
                where = self._engine.url.render_as_string(hide_password=True)
                _LOG.warning("another recorder writes %s; this one waits for its end", where)
            stop.wait(_RETRY_S)
        return False

    def __enter__(self) -> RecorderLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._drop_connection()

    def _try(self) -> bool:
        if self._engine.dialect.name == "postgresql":
            return self._try_postgres()
        return self._try_file()

    def _try_file(self) -> bool:
        database = sqlite_file(self._engine)
        if self._file is not None or database is None:
            return True
        path = database.with_name(database.name + ".recorder-lock")
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HistoryDown(f"cannot lock {path}: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return False
        self._file = handle
        return True

    def _try_postgres(self) -> bool:
        """The lock belongs to a connection, so it is asked each time whether that still lives."""
        if self._connection is not None:
            try:
                self._connection.execute(text("SELECT 1"))
                return True
            except SQLAlchemyError:
                self._drop_connection()
        with translated(self._engine):
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            ask = text("SELECT pg_try_advisory_lock(:lock)")
            if connection.scalar(ask, {"lock": _LOCK}):
                self._connection = connection
                return True
            connection.close()
            return False

    def _drop_connection(self) -> None:
        if self._connection is None:
            return
        # Not back into the pool: an advisory lock outlives a rollback
        self._connection.invalidate()
        self._connection.close()
        self._connection = None
