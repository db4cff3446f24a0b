"""Takes the journals of all runs from the live store into the history.

At least once: an entry is acknowledged only after the transaction that recorded it, and recording
it again changes nothing. Either store may be away for as long as it likes. One recorder writes; a
second one waits. It must not know what an entry means.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sqlalchemy import Engine

from storage.audit import Noted
from storage.history.audit import head, notes_position, record_notes
from storage.history.database import HistoryDown
from storage.history.recorder_lock import RecorderLock
from storage.history.retention import thin_steps
from storage.history.rows import BadEntry
from storage.history.schema import upgrade
from storage.history.writer import HistoryWriter
from storage.live.port import LiveStore, LiveStoreDown
from storage.records import JournalEntry, RecordError, decode_packed

BATCH = 500
_IDLE_S = 0.2
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_THIN_EVERY_S = 3600.0
_LOG = logging.getLogger(__name__)


class Recorder:
    """Reads what is new, records it, acknowledges it.

    Args:
        store: where the journals come from (a service client).
        engine: the history; `run_forever` upgrades its schema, `record_once` needs it upgraded.
        clock: epoch seconds.
        stop: ends `run_forever` within moments, after the batch at hand.
        is_genuine: whether a note for the audit is signed by a known writer, given its run.
    """

    def __init__(
        self,
        store: LiveStore,
        engine: Engine,
        *,
        clock: Callable[[], float],
        stop: threading.Event,
        is_genuine: Callable[[Noted, str], bool] = lambda asked, run: True,
    ) -> None:
        self._store = store
        self._engine = engine
        self._writer = HistoryWriter(engine)
        self._clock = clock
        self._stop = stop
        self._is_genuine = is_genuine
        self._noted_up_to: int | None = None
        # What the history said last; asked again whenever it was away
        self._positions: dict[str, int] = {}
        self._thinned_at = 0.0
        self._trouble = ""

    def run_forever(self) -> None:
        """Record until `stop`. Waits first while another recorder writes this history, then
        upgrades its schema.

        Raises:
            HistorySchemaError: a newer version wrote this history.
        """
        with RecorderLock(self._engine) as lock:
            backoff_s, is_upgraded = _MIN_BACKOFF_S, False
            while not self._stop.is_set():
                try:
                    if not lock.hold(self._stop):
                        break
                    if not is_upgraded:
                        upgrade(self._engine)
                        is_upgraded = True
                    idle = self.record_once() == 0
                    self._thin_when_due()
                    self._recovered()
                    backoff_s = _MIN_BACKOFF_S
                    if idle:
                        self._stop.wait(_IDLE_S)
                except (LiveStoreDown, HistoryDown, RecordError) as error:
                    self._failed(error)
                    self._stop.wait(backoff_s)
                    backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def record_once(self) -> int:
        """Record at most one batch of every run; returns the number of entries read.

        Raises:
            LiveStoreDown: the live store is away.
            HistoryDown: the history is away. Both: nothing is lost, call again.
        """
        num_read = 0
        for run, (last, acknowledged) in self._store.list_journals().items():
            if self._stop.is_set():
                break
            position = self._position(run)
            if last > position:
                raw = self._store.read_journal_raw(run, position, BATCH)
                entries = [self._decode(run, seq, body) for seq, body in raw]
                if entries:
                    position = self._writer.write(run, entries, self._clock())
                    self._positions[run] = position
                    num_read += len(entries)
            # Also without news: a store that was wiped has forgotten what we have
            if position > acknowledged:
                self._store.acknowledge(run, position)
        return num_read + self._record_notes()

    def _record_notes(self) -> int:
        if self._noted_up_to is None:
            self._noted_up_to = notes_position(self._engine)
        notes = self._store.read_notes(self._noted_up_to, BATCH)
        if notes:
            record_notes(self._engine, notes, self._clock(), self._is_genuine)
            self._noted_up_to = notes[-1][0]
            self._store.acknowledge_notes(self._noted_up_to)
        return len(notes)

    def _position(self, run: str) -> int:
        if run not in self._positions:
            self._positions[run] = self._writer.position(run)
        return self._positions[run]

    def _decode(self, run: str, seq: int, body: bytes) -> JournalEntry | BadEntry:
        try:
            entry: JournalEntry = decode_packed(body, JournalEntry)
            if (entry.run, entry.seq) != (run, seq):
                raise RecordError(f"entry {entry.seq} of run {entry.run} in this place")
        except RecordError as error:
            _LOG.warning("entry %d of run %s is set aside: %s", seq, run, error)
            return BadEntry(seq=seq, at=self._clock(), error=str(error), body=body)
        return entry

    def _thin_when_due(self) -> None:
        now = self._clock()
        if now - self._thinned_at >= _THIN_EVERY_S:
            removed = thin_steps(self._engine, now)
            self._thinned_at = now
            # A log is another place than the database: compare it with `counterpoise audit verify`
            _LOG.info("the audit ends with row %d, %s", *head(self._engine))
            if removed:
                _LOG.info("thinned %d steps older than two weeks", removed)

    def _failed(self, error: LiveStoreDown | HistoryDown | RecordError) -> None:
        self._positions.clear()
        self._noted_up_to = None
        # Once for each kind of trouble, not for each attempt
        if self._trouble != type(error).__name__:
            self._trouble = type(error).__name__
            _LOG.warning("recording waits: %s", error)

    def _recovered(self) -> None:
        if self._trouble:
            self._trouble = ""
            _LOG.warning("recording goes on")
