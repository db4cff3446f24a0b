"""History: recorded runs, found by filters; one of them in full, or several against a baseline.

Reads SQL alone: works with Redis away.
"""

from __future__ import annotations

import time

import streamlit as st

from app import context, history_audit, history_compare, history_detail
from app.components.parts import Column, Row, marked, picking_table
from app.history_detail import status_of
from app.history_sums import sum_tiles
from app.lookback import RunQuery
from app.palette import STATUS_LOOKS
from app.words import device_words, number, percent, seconds
from storage.history.queries import RunSummary

REFRESH_S = 10.0
RETRY_S = 3.0
PAGE = 50
STATUSES = (*STATUS_LOOKS, "silent")
PERIODS = {
    "any time": 0.0,
    "last day": 86400.0,
    "last week": 7 * 86400.0,
    "last month": 30 * 86400.0,
}
NOTHING = (
    "No run is recorded yet. The recorder writes a run here within seconds of its start: "
    "`./run up` starts one."
)
COLUMNS = (
    Column(label="Started", kind="right"),
    Column(label="Run", kind="wide"),
    Column(label="Status"),
    Column(label="Steps", kind="right"),
    Column(label="Loss", kind="right"),
    Column(label="Time goodput", kind="right"),
    Column(label="Token goodput", kind="right"),
    Column(label="Wall time", kind="right"),
    Column(label="Device"),
)
ONE, COMPARE, AUDIT = "One run", "Compare runs", "Audit"


def render() -> None:
    query = _filters()
    found = context.lookback().runs(query)
    if found.trouble:
        st.fragment(_away, run_every=RETRY_S)(query)
        return
    runs = found.runs[: query.limit]
    selected = st.query_params.get("run") or st.session_state.get("history_run")
    is_filtered = query != RunQuery(limit=query.limit)
    is_cut = len(found.runs) > query.limit
    if len(runs) > 1:
        sum_tiles(runs, is_cut=is_cut)
    nothing = "No recorded run matches. Clear the filters to see all." if is_filtered else NOTHING
    picked = picking_table(
        COLUMNS,
        [_row(one) for one in runs],
        "history_runs",
        label="Recorded runs",
        empty=nothing,
        selected=selected,
        max_height=260,
    )
    if picked and picked != st.session_state.get("history_run"):
        st.session_state["history_run"] = picked
        st.query_params["run"] = picked
        st.rerun()
    if is_cut:
        _more(query)
    mode = st.radio(
        "Show",
        [ONE, COMPARE, AUDIT],
        index=2 if "audit" in st.query_params else int("compare" in st.query_params),
        horizontal=True,
        key="history_mode",
        label_visibility="collapsed",
    )
    if mode == COMPARE:
        history_compare.render(runs)
    elif mode == AUDIT:
        history_audit.render(selected)
    elif selected is not None:
        living = any(one.run == selected and one.ended_at is None for one in runs)
        st.fragment(history_detail.render, run_every=REFRESH_S if living else None)(selected)
    elif runs:
        st.caption("Pick a run to see its loss, shape, decisions and where its time went.")


def _away(query: RunQuery) -> None:
    """Stands in while the history cannot be read; the page comes back by itself."""
    trouble = context.lookback().runs(query).trouble
    if not trouble:
        st.rerun()
    st.markdown(f"**History is not available.** {trouble}")
    st.markdown(
        "Live pages work without it; nothing is lost, the recorder catches up. This page tries "
        "again every few seconds."
    )


def _filters() -> RunQuery:
    search, statuses, period, tag = st.columns([3, 3, 1.5, 1.5])
    # In the address, so that a search can be kept and sent: ?period=last+week
    text = search.text_input(
        "Search runs",
        placeholder="Search by name, id or tag",
        label_visibility="collapsed",
        key="search",
        bind="query-params",
    )
    chosen = statuses.multiselect(
        "Status",
        STATUSES,
        placeholder="Any status",
        label_visibility="collapsed",
        key="status",
        bind="query-params",
    )
    since = period.selectbox(
        "Started", list(PERIODS), label_visibility="collapsed", key="period", bind="query-params"
    )
    tags = ["any tag", *context.lookback().tags()]
    tagged = tag.selectbox(
        "Tag", tags, label_visibility="collapsed", key="tag", bind="query-params"
    )
    length = PERIODS[since]
    return RunQuery(
        search=text.strip(),
        statuses=tuple(chosen),
        since=(time.time() - length) // 60 * 60 if length else 0.0,
        tag="" if tagged == tags[0] else str(tagged),
        limit=int(st.session_state.get("history_limit", PAGE)),
    )


def _more(query: RunQuery) -> None:
    text, button = st.columns([5, 1], vertical_alignment="center")
    text.caption(f"The newest {query.limit} that match. Older ones: filter, or show more.")
    if button.button("Show more", key="history_more", width="stretch"):
        st.session_state["history_limit"] = min(query.limit * 4, 2000)
        st.rerun()


def _row(run: RunSummary) -> Row:
    tags = " · " + ", ".join(run.tags) if run.tags else ""
    return Row(
        id=run.run,
        cells=(
            {"time": run.started_at},
            {"text": run.name, "sub": run.run + tags},
            marked(status_of(run), title=run.status_reason),
            number(run.steps),
            number(run.last_loss, 4),
            percent(run.time_goodput),
            percent(run.token_goodput),
            seconds(run.wall_s),
            device_words(run.device, run.emulated),
        ),
    )
