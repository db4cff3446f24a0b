"""Replicas: degree and slots, who holds how many units, share of the batch, pace against the
healthy pace.
"""

from __future__ import annotations

import streamlit as st

from app import context, header
from app.components.parts import Tile, heading, table, tiles
from app.live_shape import live_shape
from app.queries import LiveSnapshot
from app.replica_tables import PACE_COLUMNS, pace_rows, unit_table, which_units
from app.shapes import is_whole, most_pressing
from app.words import percent, plural, seconds
from storage.records import RunState

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
    pressing = most_pressing(state.replicas, MAX_UNIT_TABLES)[0]
    previous = {one.replica: one for one in snapshot.recent.previous}
    with numbers:
        tiles(_numbers(snapshot, state), "replicas_numbers")
    with shape:
        live_shape(snapshot, state, "replicas_shape")
    with pace:
        heading("Pace and share of the batch")
        rows = pace_rows(state, snapshot.racks, previous)
        empty = "No replica has reported yet."
        table(PACE_COLUMNS, rows, "replicas_pace", label="Pace", empty=empty, max_height=480)
    with units:
        heading("Units per slot")
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
