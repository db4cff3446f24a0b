"""Replicas: degree and slots, who holds how many units, share of the batch, pace against the
healthy pace.
"""

from __future__ import annotations

import streamlit as st

from app import context, header
from app.components.parts import Column, Row, heading, marked, table
from app.live_shape import live_shape
from app.palette import DEGRADED_RUN, SEVERITY_LOOKS, STATUS_LOOKS, Look
from app.shapes import is_whole, most_pressing
from app.words import DASH, number, percent, seconds
from storage.records import ReplicaState, RunState

MODE_WORDS = {"training": "training", "standby": "left out (standby)", "out": "out: no live slot"}


MAX_UNIT_TABLES = 8


def render() -> None:
    st.fragment(_live, run_every=context.tick_s())()


def _live() -> None:
    snapshot = context.snapshot()
    state = snapshot.state
    if state is None:
        header.nothing_runs(snapshot.down)
        return
    shape, pace, units = (st.container() for _ in range(3))
    with shape:
        live_shape(snapshot, state, "replicas_shape")
    with pace:
        heading("Pace and share of the batch")
        _pace(state)
    with units:
        heading("Units per slot")
        st.caption(
            "Who holds how many units of each family: query heads (attention), blocks of columns "
            "(mlp), blocks of rows (vocab). A dead slot holds none; its units went to live ones."
        )
        for replica in most_pressing(state.replicas, MAX_UNIT_TABLES)[0]:
            _units(replica)


def _pace(state: RunState) -> None:
    columns = [Column(label="Replica"), Column(label="Mode"), Column(label="Degree", kind="right")]
    columns += [
        Column(label="Samples a step", kind="right"),
        Column(label="Share of batch", kind="right"),
        Column(label="Own step time", kind="right", title="without waiting for the others"),
        Column(
            label="Against healthy pace", kind="right", title="own step time over the healthy one"
        ),
        Column(label="Boost", kind="right", title="above the normal cap, on each boosted GPU"),
    ]
    training = [one.step_s for one in state.replicas if one.mode == "training"]
    slowest = max(training, default=0.0)
    rows = [
        _pace_row(one, state, len(training) > 1 and one.step_s == slowest) for one in state.replicas
    ]
    empty = "No replica has reported yet."
    table(columns, rows, "replicas_pace", label="Pace", empty=empty, max_height=480)


def _pace_row(replica: ReplicaState, state: RunState, slowest: bool) -> Row:
    trains = replica.mode == "training"
    pace = DASH
    if trains and state.ideal_step_s > 0 and replica.step_s > 0:
        pace = f"{replica.step_s / state.ideal_step_s:.2f} ×" + (" slowest" if slowest else "")
    return Row(
        id=str(replica.replica),
        cells=(
            f"{replica.replica}, {replica.rack}",
            marked(_mode_look(replica), MODE_WORDS[replica.mode]),
            f"{len(replica.live)} of {len(replica.gpus)}",
            number(replica.num_samples),
            percent(replica.num_samples / max(state.global_batch, 1)),
            seconds(replica.step_s) if trains else DASH,
            pace,
            f"+{number(replica.boost_w)} W" if replica.boost_w > 0 else "none",
        ),
    )


def _mode_look(replica: ReplicaState) -> Look:
    if replica.mode != "training":
        return SEVERITY_LOOKS["critical" if replica.mode == "out" else "warning"]
    return STATUS_LOOKS["running"] if is_whole(replica) else DEGRADED_RUN


def _units(replica: ReplicaState) -> None:
    slots = range(len(replica.gpus))
    columns = [Column(label=f"Replica {replica.replica}: family")]
    columns += [Column(label=f"slot {slot}", kind="right") for slot in slots]
    columns.append(Column(label="total", kind="right"))
    live = set(replica.live)
    rows = []
    for family, counts in replica.units.items():
        cells = [
            number(counts[slot]) if slot in live and slot < len(counts) else DASH for slot in slots
        ]
        rows.append(Row(id=family, cells=(family, *cells, number(sum(counts)))))
    table(
        columns,
        rows,
        f"units_{replica.replica}",
        label=f"Units of replica {replica.replica}",
        empty=f"Replica {replica.replica} holds no units now.",
    )
