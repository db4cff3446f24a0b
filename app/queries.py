"""Reads of live state. One `LiveReader` serves every session: a tick costs at most one round of
reads, however many browsers look, and the journal is read onwards from where the last tick stopped.

A store that is away is a state with words, not an exception: the last snapshot stays, and says so.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from app.shapes import natural
from app.tail import Recent, StepSeries, Tail
from storage.commands import CommandResult
from storage.live.port import LiveStore, LiveStoreDown
from storage.notifier_state import NotifierState
from storage.records import EventHappened, Proposal, RackRecord, RecordError, RunState

FRESH_S = 0.45
RETRY_S = 1.0
MAX_RUNS = 8
HISTORY_RECORDS = 300
MAX_HISTORIES = 32
GAP_S = 5.0


@dataclass(frozen=True)
class LiveSnapshot:
    """Everything a tick shows of one run. down: why the store could not be read, "" when it was."""

    state: RunState | None = None
    racks: dict[str, RackRecord] = field(default_factory=dict)
    proposals: tuple[Proposal, ...] = ()
    events: tuple[EventHappened, ...] = ()
    steps: StepSeries = field(default_factory=StepSeries)
    recent: Recent = field(default_factory=Recent)
    down: str = ""

    @property
    def updated_at(self) -> float:
        """When the run last wrote anything, 0 when it never did."""
        times = [record.at for record in self.racks.values()]
        return max([self.state.updated_at if self.state else 0.0, *times])

    @property
    def open_proposals(self) -> tuple[Proposal, ...]:
        return tuple(one for one in self.proposals if not one.is_final)


class _Watched:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tail = Tail()
        self.snapshot = LiveSnapshot()
        self.next_read = 0.0


class LiveReader:
    """Snapshots of runs, shared by all sessions; safe to call from several threads."""

    def __init__(self, store: LiveStore, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._watched: OrderedDict[str, _Watched] = OrderedDict()
        self._history_lock = threading.Lock()
        self._histories: OrderedDict[tuple[str, str], deque[RackRecord]] = OrderedDict()
        self._runs: list[RunState] = []
        self._runs_down = ""
        self._next_runs = 0.0

    def runs(self) -> tuple[list[RunState], str]:
        """The runs the store knows, newest first; why it could not be asked ("" if it could)."""
        with self._lock:
            if self._monotonic() >= self._next_runs:
                try:
                    self._runs, self._runs_down = self._store.list_runs(), ""
                except (LiveStoreDown, RecordError) as error:
                    self._runs_down = str(error)
                self._next_runs = self._monotonic() + RETRY_S
            return self._runs, self._runs_down

    def read(self, run: str) -> LiveSnapshot:
        """The newest snapshot of `run`, at most `FRESH_S` old while the store answers."""
        watched = self._watch(run)
        with watched.lock:
            if self._monotonic() >= watched.next_read:
                try:
                    watched.snapshot = self._fetch(run, watched)
                    watched.next_read = self._monotonic() + FRESH_S
                except (LiveStoreDown, RecordError) as error:
                    watched.snapshot = replace(watched.snapshot, down=str(error))
                    watched.next_read = self._monotonic() + RETRY_S
            return watched.snapshot

    def refresh(self, run: str) -> None:
        """Make the next `read` ask the store (after a command was sent)."""
        with self._watch(run).lock:
            self._watch(run).next_read = 0.0

    def result(self, run: str, command: str) -> CommandResult | None:
        """The controller's answer to a command, None while there is none or the store is away."""
        try:
            return self._store.get_result(run, command)
        except (LiveStoreDown, RecordError):
            return None

    def notifier(self) -> NotifierState | None:
        """What the notifier says of itself; None when it never ran, or the store is away."""
        try:
            return self._store.get_notifier()
        except (LiveStoreDown, RecordError):
            return None

    def gpu_history(self, run: str, rack: str, count: int = HISTORY_RECORDS) -> list[RackRecord]:
        """The last records of one rack, oldest first, as far as the store answers. Read from the
        store when first asked for; from then on the snapshots are added."""
        newest = self.read(run).racks.get(rack)
        with self._history_lock:
            kept = self._histories.setdefault((run, rack), deque(maxlen=HISTORY_RECORDS))
            self._histories.move_to_end((run, rack))
            while len(self._histories) > MAX_HISTORIES:
                self._histories.popitem(last=False)
            if newest is not None and kept and kept[-1].at < newest.at <= kept[-1].at + GAP_S:
                kept.append(newest)
            elif newest is not None and (not kept or kept[-1].at < newest.at):
                try:
                    found = self._store.rack_history(run, rack, HISTORY_RECORDS)
                except (LiveStoreDown, RecordError):
                    found = []
                kept.clear()
                kept.extend(found)
            return list(kept)[-count:]

    def _watch(self, run: str) -> _Watched:
        with self._lock:
            watched = self._watched.setdefault(run, _Watched())
            self._watched.move_to_end(run)
            while len(self._watched) > MAX_RUNS:
                self._watched.popitem(last=False)
            return watched

    def _fetch(self, run: str, watched: _Watched) -> LiveSnapshot:
        store, before = self._store, watched.snapshot
        state = store.get_run(run)
        racks = store.get_racks(run)
        proposals = store.list_proposals(run)
        changed = watched.tail.read(store, run)
        if state is None and before.state is not None:
            # A store that lost its memory: the runtime writes all of it again, so keep what we had
            return replace(before, down="The store no longer knows this run.")
        return LiveSnapshot(
            state=state,
            racks={name: racks[name] for name in sorted(racks, key=natural)},
            proposals=tuple(proposals),
            events=tuple(watched.tail.events),
            steps=watched.tail.series(),
            recent=watched.tail.recent(proposals, changed=changed),
        )
