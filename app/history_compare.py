"""Up to ten runs on one axis, against a pinned baseline. The choice is in the address."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app import context
from app.compare import AXES, COLUMNS, MAX_RUNS, figure, rows
from app.components.parts import heading, table
from app.components.registry import mount
from storage.history.queries import RunSummary


def render(found: Sequence[RunSummary]) -> None:
    """found: the runs that can be chosen, beside those the address names."""
    named = [one for one in st.query_params.get("compare", "").split(",") if one][:MAX_RUNS]
    names = {one.run: f"{one.name} ({one.run})" for one in found}
    names |= {one: one for one in named if one not in names}
    choice, base, along = st.columns([4, 2, 3], vertical_alignment="bottom")
    chosen = choice.multiselect(
        f"Runs to compare (up to {MAX_RUNS})",
        list(names),
        default=named,
        format_func=lambda one: names.get(one, one),
        max_selections=MAX_RUNS,
        key="compare_runs",
        placeholder="Choose runs",
    )
    if not chosen:
        st.caption("Choose runs above: their loss and throughput are drawn on one axis.")
        return
    pinned = st.query_params.get("baseline")
    baseline = base.selectbox(
        "Baseline",
        chosen,
        index=chosen.index(pinned) if pinned in chosen else 0,
        format_func=lambda one: names.get(one, one),
        key="compare_baseline",
    )
    axis = along.radio(
        "By", list(AXES), format_func=lambda one: AXES[one], horizontal=True, key="compare_axis"
    )
    st.query_params["compare"], st.query_params["baseline"] = ",".join(chosen), str(baseline)
    read = {one: context.lookback().run(one) for one in chosen}
    runs = [past for past in read.values() if past is not None]
    if missing := [one for one, past in read.items() if past is None]:
        st.markdown(f"The history does not know {', '.join(missing)}, or cannot be read now.")
    if not runs:
        return
    by = str(axis or "wall")
    heading("Loss and throughput")
    mount("chart", figure(runs, str(baseline), by, 480), "compare_chart")
    heading("Against the baseline")
    empty = "Nothing to compare."
    table(COLUMNS, rows(runs, str(baseline), by), "compare_table", label="Runs", empty=empty)
