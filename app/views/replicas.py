"""Replicas: degree and slots, who holds how many units, share of the batch, pace against the
healthy pace.
"""

from __future__ import annotations

import streamlit as st

from app import context, header
from app.components.parts import Row, Tile, heading, linked_heading, picking_table, table, tiles
from app.live_shape import live_shape
from app.queries import LiveSnapshot
from app.replica_tables import PACE_COLUMNS, pace_rows, unit_table, which_units
from app.shapes import is_whole, most_pressing
from app.words import percent, plural, seconds
from storage.records import ReplicaState, RunState

MAX_UNIT_TABLES = 8


def render() -> None:
    st.fragment(_live, run_every=context.tick_s())()


def _live() -> None:
    snapshot = context.snapshot()
    state = snapshot.state
    if state is None:
        header.nothing_runs(snapshot.down)
        return
    numbers, shape, pace, units, which = (st.container() for _ in range(5))
    asked = _asked(state)
    pressing = most_pressing(state.replicas, MAX_UNIT_TABLES)[0]
    if asked is not None:
        pressing = [asked, *(one for one in pressing if one is not asked)]
    previous = {one.replica: one for one in snapshot.recent.previous}
    with numbers:
        tiles(_numbers(snapshot, state), "replicas_numbers")
    with shape:
        live_shape(snapshot, state, "replicas_shape")
    with pace:
        heading("Pace and share of the batch")
        rows = pace_rows(state, snapshot.racks, previous)
        empty = "No replica has reported yet."
        _pick(rows, empty, asked)
    with units:
        if asked is None:
            heading("Units per slot")
        else:
            name, run = str(asked.replica), state.run
            linked_heading(
                f"Units per slot, replica {name} first", "units_link", run=run, replica=name
            )
        st.caption(
            "Who holds how many units of each family: query heads (attention), blocks of columns "
            "(mlp), blocks of rows (vocab). A dead slot holds none; its units went to live ones. "
            "A shared unit is counted once. "
            "Underlined: it changed with this generation; hover to see what it was before."
        )
        for replica in pressing:
            columns, held = unit_table(replica, previous.get(replica.replica))
            number = replica.replica
            empty = f"Replica {number} holds no units now."
            label = f"Units of replica {number}"
            table(columns, held, f"units_{number}", label=label, empty=empty)
    with which:
        heading("Which units")
        st.caption(
            "Units by number. Where they do not divide evenly, slots share the last ones and take "
            "turns by sample: “+ 15 (2 of 6)” is unit 15, for 2 of 6 samples."
        )
        for name, columns, held in which_units(pressing):
            key = f"which_{name}"
            empty = "No slots."
            table(columns, held, key, label=f"{name}: which units", empty=empty, max_height=420)


def _asked(state: RunState) -> ReplicaState | None:
    """The replica that the address names."""
    name = st.query_params.get("replica")
    return next((one for one in state.replicas if str(one.replica) == name), None)


def _pick(rows: list[Row], empty: str, asked: ReplicaState | None) -> None:
    """The pace of every replica; a click puts its units on top."""
    selected = str(asked.replica) if asked else None
    picked = picking_table(
        PACE_COLUMNS, rows, "replicas_pace", label="Pace", empty=empty, selected=selected,
        max_height=480,
    )  # fmt: skip
    if picked is None or picked == st.session_state.get("replica_picked"):
        return
    st.session_state["replica_picked"] = picked
    st.query_params["replica"] = picked
    st.rerun(scope="fragment")


def _numbers(snapshot: LiveSnapshot, state: RunState) -> list[Tile]:
    training = [one for one in state.replicas if one.mode == "training"]
    live = sum(len(one.live) for one in training)
    slots = sum(len(one.gpus) for one in state.replicas)
    slowest = max(training, key=lambda one: one.step_s, default=None)
    spread = ""
    if slowest is not None and state.ideal_step_s > 0:
        spread = f"{slowest.step_s / state.ideal_step_s:.2f} × the healthy pace"
    exposed = snapshot.recent.exposed_sync_s
    share = exposed / state.step_s if exposed is not None and state.step_s > 0 else None
    boosted = sum(one.boost_w > 0 for one in state.replicas)
    whole = sum(map(is_whole, state.replicas))
    return [
        Tile(
            label="Replicas training",
            value=str(len(training)),
            unit=f"of {len(state.replicas)}",
            sub=f"{plural(whole, 'whole one')}, {plural(boosted, 'boosted one')}",
        ),
        Tile(label="Slots training", value=str(live), unit=f"of {slots}", sub="live and in use"),
        Tile(
            label="Slowest replica",
            value=str(slowest.replica) if slowest else "–",
            sub=spread,
        ),
        Tile(
            label="Exposed sync",
            value=seconds(exposed).removesuffix(" s"),
            unit="s",
            sub=f"{percent(share)} of the last step",
            title="Time of the last step in which gradients were waited for",
        ),
    ]
