"""What the pages need of a run's journal: read onwards from where the last tick stopped, bounded.

Knows no Streamlit. Incidents and sums are made anew only when entries came.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from app.line import on_the_line
from storage.history.incident_costs import Cost, Pace, costs_of
from storage.history.incidents import Incident, incidents_of
from storage.live.port import LiveStore
from storage.records import (
    DecisionMade,
    EventHappened,
    GenerationFormed,
    JournalEntry,
    LedgerSpent,
    Proposal,
    ReplicaState,
    RunRolledBack,
    StepCommitted,
)

MAX_STEPS = 3000
MAX_EVENTS = 200
MAX_GENERATIONS = 100
MAX_INTERVALS = 3000
TAIL_ENTRIES = 4000
READ_ENTRIES = 1000
NOW_S = 300.0


@dataclass(frozen=True)
class StepSeries:
    """The newest steps as columns, oldest first. generations: (first step, generation, cause)."""

    step: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    loss: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    tokens_per_s: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    generations: tuple[tuple[int, int, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recent:
    """What the journal's tail tells beside steps and events.

    ledger: bucket -> seconds of the last `NOW_S`. previous: the replicas of the generation before
    this one. exposed_sync_s: of the last step, None before the first.
    """

    incidents: tuple[Incident, ...] = ()
    costs: Mapping[str, Cost] = field(default_factory=dict)
    ledger: Mapping[str, float] = field(default_factory=dict)
    previous: tuple[ReplicaState, ...] = ()
    exposed_sync_s: float | None = None


class Tail:
    """The journal of one run, as far as it is kept in memory."""

    def __init__(self) -> None:
        self.seq = 0
        self.steps: deque[tuple[int, float, float]] = deque(maxlen=MAX_STEPS)
        self.events: deque[EventHappened] = deque(maxlen=MAX_EVENTS)
        self.generations: deque[GenerationFormed] = deque(maxlen=MAX_GENERATIONS)
        self._intervals: deque[LedgerSpent] = deque(maxlen=MAX_INTERVALS)
        self._decisions: deque[DecisionMade] = deque(maxlen=MAX_EVENTS)
        self._paces: OrderedDict[int, Pace] = OrderedDict()
        self._exposed_sync_s: float | None = None
        self._until = 0.0
        self._series = StepSeries()
        self._recent = Recent()

    def read(self, store: LiveStore, run: str) -> bool:
        """Read what is new; whether there was anything."""
        if self.seq == 0:
            entries = store.tail_journal(run, TAIL_ENTRIES)
        else:
            entries = store.read_journal(run, self.seq, READ_ENTRIES)
        for entry in entries:
            self._take(entry)
        if entries:
            self._series = self._columns()
        return bool(entries)

    def series(self) -> StepSeries:
        return self._series

    def recent(self, proposals: Sequence[Proposal], *, changed: bool) -> Recent:
        """changed: entries came since the last call."""
        if changed:
            self._recent = self._digest(proposals)
        return self._recent

    def _take(self, entry: JournalEntry) -> None:
        self.seq = max(self.seq, entry.seq)
        self._until = max(self._until, entry.at)
        if isinstance(entry, StepCommitted):
            pace = entry.tokens / entry.step_s if entry.step_s > 0 else np.nan
            self.steps.append((entry.step, entry.loss, pace))
            self._exposed_sync_s = entry.exposed_sync_s
            self._add_pace(entry)
        elif isinstance(entry, RunRolledBack):
            kept = [one for one in self.steps if one[0] < entry.step]
            self.steps = deque(kept, maxlen=MAX_STEPS)
        elif isinstance(entry, EventHappened):
            self.events.append(entry)
        elif isinstance(entry, GenerationFormed):
            self.generations.append(entry)
        elif isinstance(entry, LedgerSpent):
            self._intervals.append(entry)
        elif isinstance(entry, DecisionMade):
            self._decisions.append(entry)

    def _add_pace(self, entry: StepCommitted) -> None:
        had = self._paces.get(entry.generation, Pace(num_steps=0, tokens=0, step_s=0.0))
        self._paces[entry.generation] = Pace(
            num_steps=had.num_steps + 1,
            tokens=had.tokens + entry.tokens,
            step_s=had.step_s + max(0.0, entry.step_s),
        )
        while len(self._paces) > MAX_GENERATIONS:
            self._paces.popitem(last=False)

    def _columns(self) -> StepSeries:
        rows = np.array(self.steps, dtype=np.float64).reshape(-1, 3)
        return StepSeries(
            step=rows[:, 0].astype(np.int64),
            loss=rows[:, 1],
            tokens_per_s=rows[:, 2],
            generations=tuple(
                (one.first_step, one.generation, one.cause) for one in on_the_line(self.generations)
            ),
        )

    def _digest(self, proposals: Sequence[Proposal]) -> Recent:
        forms, events = list(self.generations), list(self.events)
        found = incidents_of(forms, events, proposals, list(self._decisions), self._until)
        costs: Mapping[str, Cost] = {}
        if found:
            intervals = list(self._intervals)
            costs = costs_of(found, forms, proposals, intervals, self._paces, self._until)
        return Recent(
            incidents=tuple(found),
            costs=costs,
            ledger=self._ledger_now(),
            previous=forms[-2].replicas if len(forms) > 1 else (),
            exposed_sync_s=self._exposed_sync_s,
        )

    def _ledger_now(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        if not self._intervals:
            return spent
        since = self._intervals[-1].end - NOW_S
        for one in reversed(self._intervals):
            if one.end <= since:
                break
            length = one.end - max(one.begin, since)
            spent[one.bucket] = spent.get(one.bucket, 0.0) + length
        return spent
