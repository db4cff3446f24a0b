"""Reads the journals of all runs beside the recorder and tells people what they must know.

At least once: a notice and the position behind it are written down together before it is sent, and
it is removed after it was. It only reads the journal, so that neither a dead endpoint nor a dead
notifier delays anything else. One notifier per home; a second one waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from runtime.errors import UserError
from runtime.notify.channels import Channel, NotDelivered, Refused
from runtime.notify.news import RunNews, take
from runtime.notify.notice import Notice
from runtime.notify.outbox import Outbox
from storage.live.port import MAX_RUNS, LiveStore, LiveStoreDown
from storage.notifier_state import NotifierState
from storage.records import JournalEntry, RecordError, decode_packed, encode_packed

READ_EVERY_S = 0.5
BATCH = 500
SAVE_EVERY_S = 30.0
SAY_EVERY_S = 5.0
# What happened earlier is no news: before the first start, and while the notifier was away
FIRST_LOOK_BACK_S = 60.0
LOOK_BACK_S = 6 * 3600.0
_MAX_BACKOFF_S = 5.0
_LOG = logging.getLogger(__name__)


class Kept(msgspec.Struct, kw_only=True):
    """All that is written down."""

    runs: dict[str, RunNews] = {}
    outboxes: dict[str, Outbox] = {}
    missed: int = 0


class Notifier:
    """See the module.

    Args:
        store: whose journals are read (a service client).
        channels: the ways out, each served by a thread of its own.
        folder: where positions and waiting notices are kept.
        base_url: of the dashboard, to be shown.
        clock: epoch seconds. stop: ends `run_forever` within moments.
    """

    def __init__(
        self,
        store: LiveStore,
        channels: Sequence[Channel],
        folder: Path,
        *,
        base_url: str,
        clock: Callable[[], float],
        stop: threading.Event,
    ) -> None:
        self._store, self._channels = store, list(channels)
        self._path = folder / "notifier.bin"
        self._base_url = base_url
        self._clock, self._stop = clock, stop
        self._changed = threading.Condition()
        self._kept = Kept()
        self._since = 0.0
        self._saved_at = self._said_at = 0.0
        self._trouble = ""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def run_forever(self) -> None:
        """Read and send until `stop`; waits first while another notifier uses this folder.

        Raises:
            UserError: what was written down cannot be read.
        """
        with self._lock() as is_ours:
            if not is_ours:
                return
            self.load()
            threads = [
                threading.Thread(target=self._serve, args=(channel,), name=channel.name)
                for channel in self._channels
            ]
            for thread in threads:
                thread.start()
            backoff_s = READ_EVERY_S
            while not self._stop.wait(backoff_s):
                try:
                    num_read = self.read_once()
                    self._say()
                    backoff_s = 0.0 if num_read >= BATCH else READ_EVERY_S
                    self._heard("")
                except (LiveStoreDown, RecordError) as error:
                    self._heard(str(error))
                    backoff_s = min(max(2 * backoff_s, READ_EVERY_S), _MAX_BACKOFF_S)
            with self._changed:
                self._changed.notify_all()
            for thread in threads:
                thread.join()
            self._save()

    # reading ---------------------------------------------------------------------------------
    def load(self) -> None:
        """Take up what was written down; without it, begin with what happens from now on."""
        is_first = not self._path.exists()
        self._since = self._clock() - (FIRST_LOOK_BACK_S if is_first else LOOK_BACK_S)
        if not is_first:
            try:
                self._kept = decode_packed(self._path.read_bytes(), Kept)
            except (OSError, RecordError) as error:
                raise UserError(
                    f"{self._path} cannot be read: {error}; remove it to begin anew with what "
                    "happens from now on"
                ) from error
        for channel in self._channels:
            self._kept.outboxes.setdefault(channel.name, Outbox(name=channel.name))

    def read_once(self) -> int:
        """Read at most one batch of every run; returns the number of entries read."""
        num_read = 0
        journals = self._store.list_journals()
        for run, (last, _) in journals.items():
            news = self._kept.runs.get(run) or RunNews(run=run)
            if last <= news.seq:
                continue
            raw = self._store.read_journal_raw(run, news.seq, BATCH)
            if not raw:
                continue
            num_read += len(raw)
            missing = raw[0][0] - news.seq - 1
            entries = [entry for _, body in raw if (entry := _decoded(body)) is not None]
            # Also behind an entry that does not decode
            notices = take(news, entries, self._since)
            news.seq = max(news.seq, raw[-1][0])
            self._keep(run, news, notices, missing if run in self._kept.runs else 0)
        self._forget(journals)
        return num_read

    def _keep(self, run: str, news: RunNews, notices: list[Notice], missing: int) -> None:
        with self._changed:
            self._kept.runs[run] = news
            self._kept.missed += missing
            for notice in notices:
                for channel in self._channels:
                    self._kept.outboxes[channel.name].add(notice)
            if notices or self._clock() - self._saved_at > SAVE_EVERY_S:
                self._save()
            self._changed.notify_all()

    def _forget(self, journals: dict[str, tuple[int, int]]) -> None:
        """Runs that the store has forgotten, once there are too many of them."""
        gone = [run for run in self._kept.runs if run not in journals]
        for run in gone[: max(0, len(self._kept.runs) - 2 * MAX_RUNS)]:
            del self._kept.runs[run]

    # sending ---------------------------------------------------------------------------------
    def _serve(self, channel: Channel) -> None:
        """Thread of one channel: send what is due until `stop`."""
        outbox = self._kept.outboxes[channel.name]
        while not self._stop.is_set():
            with self._changed:
                notice = outbox.due(self._clock())
                if notice is None:
                    self._changed.wait(READ_EVERY_S)
                    continue
            self._deliver(channel, outbox, notice)

    def _deliver(self, channel: Channel, outbox: Outbox, notice: Notice) -> None:
        try:
            channel.send(notice)
        except Refused as error:
            _LOG.warning("%s does not take %s: %s", channel.name, notice.id, error)
            with self._changed:
                outbox.would_not(notice, str(error))
                self._save()
        except NotDelivered as error:
            with self._changed:
                if outbox.failing_since is None:
                    _LOG.warning("%s cannot be reached: %s", channel.name, error)
                outbox.failed(str(error), self._clock(), error.retry_after_s)
        else:
            with self._changed:
                if outbox.failing_since is not None:
                    _LOG.warning("%s answers again", channel.name)
                outbox.took(notice, self._clock())
                self._save()

    # telling ---------------------------------------------------------------------------------
    def state(self) -> NotifierState:
        with self._changed:
            names = [one.name for one in self._channels]
            boxes = [self._kept.outboxes.get(name) or Outbox(name=name) for name in names]
            return NotifierState(
                at=self._clock(),
                host=socket.gethostname(),
                base_url=self._base_url,
                channels=tuple(box.state() for box in boxes),
                missed=self._kept.missed,
            )

    def _say(self) -> None:
        now = self._clock()
        if now - self._said_at >= SAY_EVERY_S:
            self._store.put_notifier(self.state())
            self._said_at = now

    def _heard(self, trouble: str) -> None:
        if bool(trouble) != bool(self._trouble):
            _LOG.warning("notices wait: %s", trouble) if trouble else _LOG.warning("reading again")
        self._trouble = trouble

    # on disk ---------------------------------------------------------------------------------
    def _save(self) -> None:
        """Written aside and renamed: a crash leaves the old or the new, never half of it."""
        with self._changed:
            body = encode_packed(self._kept)
            aside = self._path.with_suffix(".new")
            try:
                with aside.open("wb") as file:
                    os.fchmod(file.fileno(), 0o600)
                    file.write(body)
                    file.flush()
                    os.fsync(file.fileno())
                aside.replace(self._path)
                self._saved_at = self._clock()
            except OSError as error:
                _LOG.warning("cannot write %s: %s", self._path, error)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """True once no other notifier uses this folder; False when `stop` came first."""
        with self._path.with_suffix(".lock").open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    if self._stop.wait(READ_EVERY_S):
                        yield False
                        return
                else:
                    break
            yield True


def _decoded(body: bytes) -> JournalEntry | None:
    try:
        entry: JournalEntry = decode_packed(body, JournalEntry)
    except RecordError as error:
        _LOG.warning("an entry is passed over: %s", error)
        return None
    return entry
