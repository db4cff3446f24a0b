"""The run's journal: a file that is written first, and a publisher that brings it to the store.

Every entry gets its seq here. The file is the truth until the recorder has it in SQL, so neither a
dead Redis nor one that forgot everything loses an entry: the publisher asks the store for the last
seq it has seen and resends from there (the store ignores what it has).
"""

from __future__ import annotations

import base64
import binascii
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from runtime.errors import UserError
from storage.live.port import LiveStore, LiveStoreDown
from storage.records import JournalEntry, RecordError, decode_packed, encode_packed

BATCH = 500
HELD_BACK = 50_000
_LOG = logging.getLogger(__name__)


class Outbox:
    """Append-only journal file of one run, and its way into the live store.

    Args:
        path: the journal file; an existing one is continued after its last whole line.
        run: run id.
        store: live store; None keeps the journal in the file alone.
    """

    def __init__(self, path: Path, *, run: str, store: LiveStore | None) -> None:
        self._path = path
        self._run = run
        self._store = store
        self._lock = threading.Lock()
        self._offsets: list[int] = []
        self._fresh = threading.Event()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._recover()
        self._file = path.open("ab")

    @property
    def last_seq(self) -> int:
        return len(self._offsets)

    def write(self, entry: JournalEntry) -> JournalEntry:
        """Number an entry and append it to the file; returns it with its seq."""
        with self._lock:
            numbered = msgspec.structs.replace(entry, seq=self.last_seq + 1)
            offset = self._file.tell()
            # MessagePack keeps what JSON has no number for; base64 keeps an entry on one line.
            self._file.write(base64.b64encode(encode_packed(numbered)) + b"\n")
            self._file.flush()
            self._offsets.append(offset)
        self._fresh.set()
        return numbered

    def read(self, after: int, count: int) -> list[JournalEntry]:
        """Entries with seq > `after`, at most `count`, from the file."""
        with self._lock:
            if after >= self.last_seq:
                return []
            offset = self._offsets[after]
        entries: list[JournalEntry] = []
        with self._path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if len(entries) >= count or not line.endswith(b"\n"):
                    break
                try:
                    entries.append(_decode(line))
                except RecordError as error:
                    _LOG.error("journal %s: %s", self._path, error)
        return entries

    def read_all(self) -> list[JournalEntry]:
        """The whole journal, oldest first."""
        return self.read(0, self.last_seq)

    def publish_forever(self, stop: threading.Event, on_return: Callable[[], None]) -> None:
        """Bring entries to the live store until `stop`; `on_return` runs after each time the store
        was away, so that what is not in the journal can be written again."""
        if self._store is None:
            return
        away = True
        sent = 0
        while not stop.is_set():
            try:
                if away:
                    sent = self._store.last_seq(self._run)
                    on_return()
                    away = False
                held = self._store.last_seq(self._run)
                if held < sent:
                    # It came back so quickly that nobody noticed, but it has forgotten.
                    sent = held
                    on_return()
                sent = self._publish(self._store, sent, stop)
            except LiveStoreDown as error:
                if not away:
                    _LOG.warning("journal waits for the live store: %s", error)
                away = True
                stop.wait(0.5)
                continue
            if sent >= self.last_seq:
                self._fresh.wait(0.5)
                self._fresh.clear()

    def flush(self, deadline_s: float, stop: threading.Event) -> bool:
        """Wait until the store has everything, for a clean end. False: it has not."""
        if self._store is None:
            return True
        waited = 0.0
        while waited < deadline_s:
            try:
                if self._store.last_seq(self._run) >= self.last_seq:
                    return True
            except LiveStoreDown:
                pass
            stop.wait(0.05)
            waited += 0.05
        return False

    def _publish(self, store: LiveStore, sent: int, stop: threading.Event) -> int:
        """Send one batch; hold back while the recorder is far behind: the stream stays bounded."""
        if sent - store.acknowledged(self._run) > HELD_BACK:
            stop.wait(0.5)
            return sent
        entries = self.read(sent, BATCH)
        return store.append(self._run, entries, after=sent) if entries else sent

    def _recover(self) -> None:
        """Index an existing file; cut off a last line that a crash left unfinished.

        Raises:
            UserError: an entry before the last is damaged; what follows it must not be lost.
        """
        if not self._path.exists():
            return
        end = 0
        with self._path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    _decode(line)
                except RecordError as error:
                    if file.read(1):
                        raise UserError(
                            f"{self._path} is damaged at entry {len(self._offsets) + 1} ({error}); "
                            "the run cannot be taken over. Stop its agents and start a new run."
                        ) from error
                    break
                self._offsets.append(end)
                end += len(line)
        if end < self._path.stat().st_size:
            _LOG.warning("journal %s: cut off an unfinished last entry", self._path)
            with self._path.open("r+b") as file:
                file.truncate(end)

    def close(self) -> None:
        with self._lock:
            self._file.close()


def _decode(line: bytes) -> JournalEntry:
    try:
        packed = base64.b64decode(line.rstrip(b"\n"), validate=True)
    except binascii.Error as error:
        raise RecordError(f"not a journal line: {error}") from error
    entry: JournalEntry = decode_packed(packed, JournalEntry)
    return entry
