"""Reads of the SQL history, for the History page. Never in a tick of a live page.

A database that is away, or without tables, is a sentence in `trouble`, not an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import streamlit as st

from storage.history.database import HistoryDown, HistoryRejectedError
from storage.history.incident_costs import Cost, costs_of
from storage.history.incidents import Incident, incidents_of
from storage.history.queries import History, RunDetail, RunSummary
from storage.history.series import StepSeries
from storage.records import (
    DecisionMade,
    EventHappened,
    GenerationFormed,
    Proposal,
    RecordError,
)

MAX_RUNS = 200
MAX_POINTS = 2000
MAX_INCIDENT_EVENTS = 5000
MAX_PRICED = 100
CACHE_S = 5.0
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


@dataclass(frozen=True, kw_only=True, eq=False)
class PastIncidents:
    """The incidents of a run with what they cost. until: how far its journal reaches."""

    incidents: tuple[Incident, ...]
    costs: Mapping[str, Cost]
    until: float


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

    def runs(self, search: str) -> Found:
        """Newest first."""
        return _runs(self._history, search)

    def run(self, run: str) -> PastRun | None:
        """None when the history does not know the run, or cannot be asked (`runs` says why)."""
        return _run(self._history, run)

    def incidents(self, run: str) -> PastIncidents | None:
        """The incidents of a run, oldest first; None when the history does not know the run, or
        cannot be asked."""
        return _incidents(self._history, run)


@st.cache_resource(ttl=CACHE_S, max_entries=32, show_spinner=False)
def _runs(_history: History, search: str) -> Found:
    try:
        schema = _history.schema_state()
        if schema.state != "ready":
            return Found(trouble=schema.message)
        return Found(runs=tuple(_history.list_runs(MAX_RUNS, search)))
    except TROUBLES as error:
        return Found(trouble=str(error))


@st.cache_resource(ttl=CACHE_S, max_entries=16, show_spinner=False)
def _run(_history: History, run: str) -> PastRun | None:
    try:
        detail = _history.run(run)
        if detail is None:
            return None
        return PastRun(
            detail=detail,
            steps=_history.steps(run, MAX_POINTS),
            generations=tuple(_history.generations(run)),
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
