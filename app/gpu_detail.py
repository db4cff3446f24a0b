"""One GPU on the Racks page: its numbers, its last minutes, what was seen and what was done."""

from __future__ import annotations

import math

import numpy as np
import streamlit as st

from app import context, dialogs
from app.commands import mint
from app.components.parts import Tile, linked_heading, tiles
from app.components.registry import mount
from app.figures import gpu_series
from app.incident_parts import timeline
from app.palette import CELL_LOOKS
from app.queries import LiveSnapshot
from app.shapes import Looks, slot_of
from app.tables import event_table
from app.words import DASH, number
from storage.commands import Fault
from storage.records import RackRecord, RunState

PANELS = (
    ("power", "power_w", "W", 1.0),
    ("temperature", "temp_c", "°C", 1.0),
    ("utilisation", "util", "%", 100.0),
    ("clock", "clock_mhz", "MHz", 1.0),
)


def gpu_detail(snapshot: LiveSnapshot, state: RunState, looks: Looks, gpu: str | None) -> None:
    """Everything known of GPU `gpu`."""
    record = snapshot.racks.get(gpu.rpartition("/")[0]) if gpu else None
    if gpu is None:
        st.caption("Click a GPU to see its numbers, its last minutes and what was done about it.")
        return
    if record is None or not gpu.rpartition("/")[2].isdigit() or slot_of(gpu) >= record.num_gpus:
        st.caption(f"This run has no GPU {gpu}.")
        return
    slot = slot_of(gpu)
    linked_heading(f"GPU {gpu}", "gpu_link", run=state.run, gpu=gpu)
    look = list(CELL_LOOKS.values())[looks[record.rack][slot]]
    tiles(_tiles(record, slot, look.word), "gpu_tiles")
    chart, told = st.columns([3, 2], gap="medium")
    with chart:
        _chart(context.reader().gpu_history(state.run, record.rack), slot)
    with told:
        _told(snapshot, gpu)
    if state.emulated and state.status not in context.ENDED:
        failed = record.state_names()[slot] in ("failed", "repairing")
        label = "Repair this GPU" if failed else "Inject fault"
        lacks = context.lacks(Fault)
        if st.button(f"{label} (emulated run)…", key="inject_fault", disabled=bool(lacks)):
            dialogs.fault(state.run, gpu, failed, mint())
        if lacks:
            st.caption(lacks)


def _told(snapshot: LiveSnapshot, gpu: str) -> None:
    """The newest incident of the GPU as a timeline, else its events."""
    own = [one for one in snapshot.recent.incidents if gpu in one.gpus]
    if own:
        newest = own[-1]
        timeline(newest, snapshot.updated_at, f"gpu_timeline_{newest.id}")
        if st.button("Show the incident and its cost", key="gpu_incident"):
            run = context.selected_run() or ""
            context.open_page("incidents", run=run, incident=newest.id)
        return
    events = [event for event in snapshot.events if event.gpu == gpu]
    event_table(events[-20:], "gpu_events", 220, f"No event names {gpu} among the newest ones.")


def _tiles(record: RackRecord, slot: int, word: str) -> list[Tile]:
    value = {
        name: float(record.column(name)[slot])
        for name in ("power_w", "cap_w", "temp_c", "util", "clock_mhz", "step_s", "ecc")
    }
    over = value["cap_w"] - record.normal_cap_w
    cap = f"cap {number(value['cap_w'])} W" + (f", boost {over:+.0f} W" if over > 1 else "")
    own, others = value["step_s"], record.column("step_s")
    middle = float(np.median(others[others > 0])) if (others > 0).any() else 0.0
    pace = f"{own / middle:.2f} × the rack's median" if own > 0 and middle > 0 else ""
    return [
        Tile(label="State", value=word, sub="emulated device" if record.emulated else ""),
        Tile(label="Power", value=number(value["power_w"]), unit="W", sub=cap),
        Tile(label="Temperature", value=number(value["temp_c"]), unit="°C"),
        Tile(label="Utilisation", value=number(100 * value["util"]), unit="%"),
        Tile(label="Clock", value=number(value["clock_mhz"]), unit="MHz"),
        Tile(label="Its share of a step", value=number(own, 2), unit="s", sub=pace),
        _ecc(value["ecc"], record.emulated),
    ]


def _ecc(errors: float, emulated: bool) -> Tile:
    label, title = "ECC errors", "Uncorrected, as the health sources (NVML, DCGM) count them"
    if math.isfinite(errors):
        return Tile(label=label, value=number(errors), sub="uncorrected", title=title)
    why = "emulated" if emulated else "not counted"
    return Tile(label=label, value=DASH, sub=f"no data: {why}", title=title)


def _chart(records: list[RackRecord], slot: int) -> None:
    records = [record for record in records if slot < record.num_gpus]
    if len(records) < 2:
        st.caption("Its history begins with the second reading.")
        return
    at = np.array([record.at for record in records])
    columns = {}
    for label, name, unit, scale in PANELS:
        values = np.array([record.column(name)[slot] for record in records], np.float32)
        columns[label] = (values * np.float32(scale), unit)
    mount("chart", gpu_series(at, columns, 380), "gpu_chart")
