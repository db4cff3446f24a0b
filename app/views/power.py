"""Power: budget against caps and draw per rack, boosts, headroom, and the journal of caps."""

from __future__ import annotations

import streamlit as st

from app import context, header
from app.components.parts import Column, Row, Tile, heading, marked, picking_table, table, tiles
from app.components.registry import mount
from app.palette import CELL_LOOKS, SEVERITY_LOOKS
from app.power_budget import budget_control
from app.power_figures import RackWatts, cap_journal, headroom_words, rack_watts, watts_chart
from app.queries import LiveSnapshot
from app.words import DASH, number, plural, watts
from storage.records import EventHappened, RunState

HISTORY_SECONDS = 300
CHART_HEIGHT = 260
JOURNAL_COLUMNS = (
    Column(label="When", kind="right"),
    Column(label="Rack"),
    Column(label="What was set", kind="wide"),
    Column(label="By"),
    Column(label="Caps of budget", kind="right", title="sum of caps afterwards, and the budget"),
)
NO_JOURNAL = (
    "No cap has been set yet. Every cap that is set, lowered or refused is listed here, with who "
    "asked for it and why."
)


def render() -> None:
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
    rows = [rack_watts(record, state.replicas) for record in snapshot.racks.values()]
    numbers, racks, chart, journal = (st.container() for _ in range(4))
    with numbers:
        tiles(_totals(rows, state), "power_tiles")
        for notice in sorted({row.notice for row in rows if row.notice})[:3]:
            where = ", ".join(row.rack for row in rows if row.notice == notice)
            st.markdown(f"**{where}:** {notice}")
    with racks:
        heading("Racks")
        picked = _racks(rows)
        budget_control(state, next(row for row in rows if row.rack == picked))
    with chart:
        _chart(snapshot, picked)
    with journal:
        heading("Journal of caps")
        _journal(cap_journal(snapshot.events))
        st.caption("Older entries are among the events of the run in History.")


def _totals(rows: list[RackWatts], state: RunState) -> list[Tile]:
    budget_w, caps_w = sum(row.budget_w for row in rows), sum(row.caps_w for row in rows)
    drawn_w = sum(row.drawn_w for row in rows)
    boosted = sum(row.num_boosted for row in rows)
    known = [row.headroom for row in rows if row.headroom is not None]
    least = min(known) if known else None
    backends = ", ".join(sorted({row.backend for row in rows if row.backend}))
    kind = "emulated devices" if state.emulated else backends
    return [
        Tile(label="Budget", value=watts(budget_w), sub=plural(len(rows), "rack")),
        Tile(
            label="Sum of caps",
            value=watts(caps_w),
            sub=f"{watts(budget_w - caps_w)} free",
            title="Never above the budget",
        ),
        Tile(label="Draw", value=watts(drawn_w), sub=kind),
        Tile(
            label="Boosted GPUs",
            value=number(boosted),
            sub=f"up to +{max(row.boost_w for row in rows):.0f} W each" if boosted else "none",
        ),
        Tile(
            label="Headroom",
            value=DASH if least is None else number(least),
            sub="more failures that power can cover, in the tightest rack",
            title="By the model's curve and the budgets that stand",
        ),
    ]


def _racks(rows: list[RackWatts]) -> str:
    columns = [Column(label="Rack")]
    columns += [
        Column(label=name, kind="right", title=title)
        for name, title in (
            ("Budget", ""),
            ("Sum of caps", "never above the budget"),
            ("Free", "watts that a boost may still take"),
            ("Draw", ""),
            ("Hottest", ""),
        )
    ]
    columns += [
        Column(label="Boost"),
        Column(label="Headroom", kind="right", title="failures that power can still cover"),
    ]
    chosen = st.session_state.get("power_rack")
    known = any(row.rack == chosen for row in rows)
    selected = str(chosen) if known else _foremost(rows)
    picked = picking_table(
        columns,
        [_rack_row(row) for row in rows],
        "power_racks",
        label="Racks",
        empty="No rack has reported yet.",
        selected=selected,
        max_height=320,
    )
    if picked and picked != chosen:
        st.session_state["power_rack"] = picked
        st.rerun(scope="fragment")
    return selected


def _foremost(rows: list[RackWatts]) -> str:
    """The rack to look at first: the most boosted, else the first."""
    return max(rows, key=lambda row: row.boost_w).rack


def _rack_row(row: RackWatts) -> Row:
    boost = (
        marked(
            CELL_LOOKS["boosted"], f"{plural(row.num_boosted, 'GPU')} up to +{row.boost_w:.0f} W"
        )
        if row.num_boosted
        else "none"
    )
    return Row(
        id=row.rack,
        cells=(
            row.rack,
            f"{number(row.budget_w)} W",
            f"{number(row.caps_w)} W",
            f"{number(row.free_w)} W",
            f"{number(row.drawn_w)} W",
            DASH if row.hottest_c is None else f"{number(row.hottest_c)} °C",
            boost,
            headroom_words(row.headroom),
        ),
    )


def _chart(snapshot: LiveSnapshot, rack: str) -> None:
    state = snapshot.state
    assert state is not None
    heading(f"Rack {rack}, last {HISTORY_SECONDS // 60} minutes")
    records = context.reader().gpu_history(state.run, rack, HISTORY_SECONDS)
    if len(records) < 2:
        st.caption("Its history begins with the second reading.")
        return
    mount("chart", watts_chart(records, CHART_HEIGHT), "power_chart")


def _journal(events: list[EventHappened]) -> None:
    rows = [
        Row(
            id=str(event.seq),
            cells=(
                {"time": event.at},
                event.rack or "all",
                marked(SEVERITY_LOOKS[event.severity], event.message, event.kind),
                str(event.details.get("by", DASH)),
                _of_budget(event),
            ),
        )
        for event in reversed(events)
    ]
    table(
        JOURNAL_COLUMNS,
        rows,
        "power_journal",
        label="Journal of caps",
        empty=NO_JOURNAL,
        max_height=400,
    )


def _of_budget(event: EventHappened) -> str:
    sum_w, budget_w = event.details.get("sum_w"), event.details.get("budget_w")
    if not isinstance(sum_w, int | float) or not isinstance(budget_w, int | float):
        return DASH
    return f"{number(sum_w)} of {number(budget_w)} W"
