"""Reads of the SQL history, for the pages that look back. Never in a tick of a live page.

A database that is away, or without tables, is a sentence in `trouble`, not an exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import streamlit as st

from app.tail import Recent
from storage.audit import AuditRow
from storage.history.audit import Verified, list_audit, verify
from storage.history.counterfactual import AgainstDrop, against_drop
from storage.history.database import HistoryDown, HistoryRejectedError
from storage.history.incident_costs import Cost, costs_of
from storage.history.incidents import Incident, incidents_of
from storage.history.notes import Note, add_note, all_tags, notes_of, set_tags
from storage.history.queries import History, RunDetail, RunSummary
from storage.history.series import StepSeries
from storage.records import (
    DecisionMade,
    EventHappened,
    GenerationFormed,
    Proposal,
    RecordError,
)

MAX_POINTS = 2000
MAX_INCIDENT_EVENTS = 5000
MAX_PRICED = 100
CACHE_S = 5.0
YOUNG_S = 1800.0
TROUBLES = (HistoryDown, HistoryRejectedError, RecordError)


@dataclass(frozen=True, kw_only=True, eq=False)
class PastRun:
    """Everything the page shows of one run. Lists are oldest first."""

    detail: RunDetail
    steps: StepSeries
    generations: tuple[GenerationFormed, ...]
    events: tuple[EventHappened, ...]
    proposals: tuple[Proposal, ...]
    decisions: tuple[DecisionMade, ...]
    against: AgainstDrop | None = None
    notes: tuple[Note, ...] = ()

    @property
    def num_gpus(self) -> int:
        """GPUs the run was given."""
        shapes = [sum(len(one.gpus) for one in form.replicas) for form in self.generations]
        return max(shapes, default=0)

    @property
    def end(self) -> float:
        return self.detail.last_at if self.detail.ended_at is None else self.detail.ended_at


@dataclass(frozen=True, kw_only=True, eq=False)
class PastIncidents:
    """The incidents of a run with what they cost. until: how far its journal reaches."""

    incidents: tuple[Incident, ...]
    costs: Mapping[str, Cost]
    until: float


def with_newest(past: PastIncidents, recent: Recent, until: float) -> PastIncidents:
    """`past` with what the live store tells beyond it: the recorder, and what is cached here, are
    some moments behind. Only young incidents: of old ones the live store has no full account.

    until: how far the live store's journal reaches.
    """
    found, costs = {one.id: one for one in past.incidents}, dict(past.costs)
    for one in recent.incidents:
        held = found.get(one.id)
        is_news = one.begin > past.until if held is None else held.is_open
        if is_news and one.begin > until - YOUNG_S and one.id in recent.costs:
            found[one.id], costs[one.id] = one, recent.costs[one.id]
    until = max(past.until, until)
    return PastIncidents(incidents=tuple(found.values()), costs=costs, until=until)


@dataclass(frozen=True, kw_only=True)
class RunQuery:
    """What the list of runs shows. since: epoch seconds, to a minute, so that it can be cached."""

    search: str = ""
    statuses: tuple[str, ...] = ()
    since: float = 0.0
    tag: str = ""
    limit: int = 100


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """Runs of a search. trouble: why there is no answer, "" when there is one."""

    runs: tuple[RunSummary, ...] = ()
    trouble: str = ""


class Lookback:
    """The history as the page asks for it; one for all sessions.

    Raises:
        HistoryDown: `url` is not an address of a database.
    """

    def __init__(self, url: str) -> None:
        self._history = History.open(url)

    def runs(self, query: RunQuery) -> Found:
        """Newest first, one more than `query.limit` when there are more."""
        return _runs(self._history, query)

    def tags(self) -> list[str]:
        """Every tag in use."""
        return _tags(self._history)

    def add_note(self, run: str, note: Note) -> str:
        """Why it could not be kept, "" when it was."""
        return _written(lambda: add_note(self._history.engine, run, note))

    def set_tags(self, run: str, tags: list[str], who: str) -> str:
        """Why they could not be kept, "" when they were."""
        now = time.time()
        return _written(lambda: set_tags(self._history.engine, run, tags, who=who, at=now))

    def step_columns(self, run: str) -> dict[str, list[Any]]:
        """All steps of a run that are still kept one by one, for export.

        Raises:
            HistoryDown: the database cannot be used.
        """
        return self._history.step_columns(run)

    def run(self, run: str) -> PastRun | None:
        """None when the history does not know the run, or cannot be asked (`runs` says why)."""
        return _run(self._history, run)

    def incidents(self, run: str) -> PastIncidents | None:
        """The incidents of a run, oldest first; None when the history does not know the run, or
        cannot be asked."""
        return _incidents(self._history, run)

    def audit(self, search: str, run: str, limit: int) -> tuple[list[AuditRow], str]:
        """The newest rows of the audit that match (run "": of all runs), and why there are none."""
        try:
            return list_audit(self._history.engine, run=run, search=search, limit=limit), ""
        except TROUBLES as error:
            return [], str(error)

    def verify_audit(self) -> tuple[Verified | None, str]:
        """What walking the chain found, else why it could not be walked."""
        try:
            return verify(self._history.engine), ""
        except TROUBLES as error:
            return None, str(error)


@st.cache_resource(ttl=CACHE_S, max_entries=32, show_spinner=False)
def _runs(_history: History, query: RunQuery) -> Found:
    try:
        schema = _history.schema_state()
        if schema.state != "ready":
            return Found(trouble=schema.message)
        found = _history.list_runs(
            query.limit + 1,
            query.search,
            statuses=query.statuses,
            since=query.since,
            tag=query.tag,
        )
        return Found(runs=tuple(found))
    except TROUBLES as error:
        return Found(trouble=str(error))


@st.cache_resource(ttl=CACHE_S, max_entries=1, show_spinner=False)
def _tags(_history: History) -> list[str]:
    try:
        return all_tags(_history.engine)
    except TROUBLES:
        return []


def _written(write: Callable[[], None]) -> str:
    try:
        write()
    except TROUBLES as error:
        return f"Not kept: {error}"
    # What was cached no longer holds
    _runs.clear()
    _run.clear()
    _tags.clear()
    return ""


@st.cache_resource(ttl=CACHE_S, max_entries=16, show_spinner=False)
def _run(_history: History, run: str) -> PastRun | None:
    try:
        detail = _history.run(run)
        if detail is None:
            return None
        generations = tuple(_history.generations(run))
        end = detail.last_at if detail.ended_at is None else detail.ended_at
        return PastRun(
            detail=detail,
            steps=_history.steps(run, MAX_POINTS),
            generations=generations,
            against=against_drop(generations, _history.paces(run), end),
            notes=tuple(notes_of(_history.engine, run)),
            events=tuple(_history.events(run)),
            proposals=tuple(_history.proposals(run)),
            decisions=tuple(_history.decisions(run)),
        )
    except TROUBLES:
        return None


@st.cache_resource(ttl=CACHE_S, max_entries=16, show_spinner=False)
def _incidents(_history: History, run: str) -> PastIncidents | None:
    try:
        detail = _history.run(run)
        if detail is None:
            return None
        generations, proposals = _history.generations(run), _history.proposals(run)
        events, decisions = _history.events(run, MAX_INCIDENT_EVENTS), _history.decisions(run)
        until = detail.last_at if detail.ended_at is None else detail.ended_at
        found = incidents_of(generations, events, proposals, decisions, until)
        priced = found[-MAX_PRICED:]
        costs: Mapping[str, Cost] = {}
        if priced:
            spans = _history.ledger_intervals(run, within=(priced[0].begin, until))
            paces = _history.paces(run)
            costs = costs_of(priced, generations, proposals, spans, paces, until)
        return PastIncidents(incidents=tuple(found), costs=costs, until=until)
    except TROUBLES:
        return None
