"""Racks: every rack as drawn hardware, every GPU a cell; a click shows the GPU."""

from __future__ import annotations

import numpy as np
import streamlit as st

from app import context, header
from app.components.fleet import LENSES, fleet_map
from app.components.parts import Column, Row, heading, marked, table
from app.gpu_detail import gpu_detail
from app.palette import CELL_LOOKS
from app.queries import LiveSnapshot
from app.rack_filter import QUIET, SORTS, Mask, RackQuery, in_order, matches, ordered
from app.shapes import Looks, rack_looks
from app.words import number, plural

MAX_LISTED = 40
STATES = [name for name in CELL_LOOKS if name not in ("healthy", "idle", "dead")]


def render() -> None:
    lenses = {lens.id: lens for lens in LENSES}
    chosen = st.radio(
        "Lens",
        list(lenses),
        format_func=lambda one: lenses[one].label,
        horizontal=True,
        key="racks_lens",
        label_visibility="collapsed",
    )
    st.session_state["racks_shown_lens"] = chosen or "state"
    if (rack := st.query_params.get("rack")) and rack != st.session_state.get("racks_asked"):
        # Once: what is typed after the address was opened counts
        st.session_state["racks_asked"], st.session_state["racks_search"] = rack, f"{rack}/"
    search, states, sort = st.columns([2, 3, 2])
    search.text_input(
        "Search",
        placeholder="Search a rack or GPU, such as rack-3 or rack-3/7",
        key="racks_search",
        label_visibility="collapsed",
    )
    states.multiselect(
        "States",
        STATES,
        format_func=lambda one: CELL_LOOKS[one].word,
        placeholder="Only these states",
        key="racks_states",
        label_visibility="collapsed",
    )
    sort.selectbox(
        "Order",
        list(SORTS),
        format_func=lambda one: f"Order: {one}",
        key="racks_sort",
        label_visibility="collapsed",
        on_change=lambda: st.session_state.pop("racks_order", None),
    )
    st.fragment(_live, run_every=context.tick_s())()


def _live() -> None:
    snapshot = context.snapshot()
    state = snapshot.state
    if state is None:
        header.nothing_runs(snapshot.down)
        return
    if not snapshot.racks:
        st.markdown("No rack has reported yet. Agents report once a second as soon as they run.")
        return
    looks = rack_looks(snapshot.racks, state.replicas)
    lens = next(one for one in LENSES if one.id == st.session_state["racks_shown_lens"])
    drawn, gpu, listed = (st.container() for _ in range(3))
    query = _query()
    shown = None if query.is_empty else matches(snapshot.racks, looks, query)
    with drawn:
        if shown is not None:
            found = sum(int(mask.sum()) for mask in shown.values())
            st.caption(f"{plural(found, 'GPU')} in {plural(len(shown), 'rack')} match.")
        racks = in_order(snapshot.racks, _order(snapshot, looks))
        picked = fleet_map(racks, looks, lens, _selected(), "fleet", shown)
        if picked and picked != st.session_state.get("racks_picked"):
            st.session_state["racks_picked"] = picked
            st.query_params["gpu"] = picked
            st.rerun(scope="fragment")
    with gpu:
        gpu_detail(snapshot, state, looks, _selected())
    with listed:
        _listed(snapshot, looks, shown)


def _query() -> RackQuery:
    state = st.session_state
    return RackQuery(
        search=str(state.get("racks_search", "")), states=tuple(state.get("racks_states", ()))
    )


def _order(snapshot: LiveSnapshot, looks: Looks) -> tuple[str, ...]:
    """Taken when it was chosen, then kept: racks do not swap places under the pointer."""
    run = snapshot.state.run if snapshot.state else ""
    kept: tuple[str, tuple[str, ...]] | None = st.session_state.get("racks_order")
    if kept is None or kept[0] != run:
        sort = str(st.session_state.get("racks_sort", "name"))
        kept = (run, ordered(snapshot.racks, looks, sort))
        st.session_state["racks_order"] = kept
    return kept[1]


def _selected() -> str | None:
    return st.session_state.get("racks_picked") or st.query_params.get("gpu")


def _listed(snapshot: LiveSnapshot, looks: Looks, shown: dict[str, Mask] | None) -> None:
    """What is not healthy or not at its normal cap (or what the filter found), in words: for people
    who do not see the map, and to copy ids from.
    """
    names = list(CELL_LOOKS)
    rows: list[Row] = []
    for rack, codes in looks.items():
        if shown is not None and rack not in shown:
            continue
        wanted = ~np.isin(codes, QUIET) if shown is None else shown[rack]
        record = snapshot.racks[rack]
        for slot in np.flatnonzero(wanted)[: MAX_LISTED - len(rows)]:
            cells = (
                f"{rack}/{slot}",
                marked(CELL_LOOKS[names[codes[slot]]]),
                f"{number(float(record.column('power_w')[slot]))} W",
                f"{number(float(record.column('cap_w')[slot]))} W",
                f"{number(float(record.column('temp_c')[slot]))} °C",
            )
            rows.append(Row(id=f"{rack}/{slot}", cells=cells))
        if len(rows) >= MAX_LISTED:
            break
    title = "GPUs to look at" if shown is None else "GPUs that match"
    heading(title)
    columns = [Column(label="GPU"), Column(label="State")]
    columns += [Column(label=name, kind="right") for name in ("Power", "Cap", "Temperature")]
    empty = "None: every GPU is healthy and at its normal cap."
    if shown is not None:
        empty = "No GPU matches. Clear the search or the states to see all."
    table(columns, rows, "racks_listed", label=title, empty=empty)
    if len(rows) >= MAX_LISTED:
        st.caption(f"The first {MAX_LISTED}; the map shows all.")
