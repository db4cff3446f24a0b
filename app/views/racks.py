"""Racks: every rack as drawn hardware, every GPU a cell; a click shows the GPU."""

from __future__ import annotations

import numpy as np
import streamlit as st

from app import context, dialogs, header
from app.commands import mint
from app.components.fleet import LENSES, fleet_map
from app.components.parts import Column, Row, Tile, heading, marked, table, tiles
from app.components.registry import mount
from app.figures import gpu_series
from app.palette import CELL_CODES, CELL_LOOKS
from app.queries import LiveSnapshot
from app.shapes import Looks, rack_looks, slot_of
from app.tables import event_table
from app.words import number
from storage.records import RackRecord, RunState

HISTORY_SECONDS = 300
MAX_LISTED = 40
# Left-out and dead slots follow from a failure elsewhere; the list is of causes
QUIET = [CELL_CODES[name] for name in ("healthy", "idle", "dead")]


def render() -> None:
    lenses = {lens.id: lens for lens in LENSES}
    chosen = st.segmented_control(
        "Lens",
        list(lenses),
        format_func=lambda one: lenses[one].label,
        default="state",
        key="racks_lens",
        label_visibility="collapsed",
    )
    st.session_state["racks_shown_lens"] = chosen or "state"
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
    with drawn:
        picked = fleet_map(snapshot.racks, looks, lens, _selected(), "fleet")
        if picked and picked != st.session_state.get("racks_picked"):
            st.session_state["racks_picked"] = picked
            st.query_params["gpu"] = picked
            st.rerun(scope="fragment")
    with gpu:
        _gpu(snapshot, state, looks)
    with listed:
        _listed(snapshot, looks)


def _selected() -> str | None:
    return st.session_state.get("racks_picked") or st.query_params.get("gpu")


def _gpu(snapshot: LiveSnapshot, state: RunState, looks: Looks) -> None:
    selected = _selected()
    record = snapshot.racks.get(selected.rpartition("/")[0]) if selected else None
    if selected is None or record is None or slot_of(selected) >= record.num_gpus:
        st.caption("Click a GPU to see its power, temperature and recent history.")
        return
    slot = slot_of(selected)
    look = list(CELL_LOOKS.values())[looks[record.rack][slot]]
    heading(f"GPU {selected}")
    tiles(_gpu_tiles(record, slot, look.word), "gpu_tiles")
    _gpu_chart(context.reader().gpu_history(state.run, record.rack, HISTORY_SECONDS), slot)
    own = [event for event in snapshot.events if event.gpu == selected]
    event_table(own[-20:], "gpu_events", 180, f"No event names {selected} among the newest ones.")
    if state.emulated and state.status not in context.ENDED:
        failed = record.state_names()[slot] in ("failed", "repairing")
        label = "Repair this GPU" if failed else "Inject fault"
        if st.button(f"{label} (emulated run)…", key="inject_fault"):
            dialogs.fault(state.run, selected, failed, mint())


def _gpu_tiles(record: RackRecord, slot: int, word: str) -> list[Tile]:
    value = {
        name: float(record.column(name)[slot])
        for name in ("power_w", "cap_w", "temp_c", "util", "clock_mhz", "step_s")
    }
    over = value["cap_w"] - record.normal_cap_w
    cap = f"cap {number(value['cap_w'])} W" + (f", boost {over:+.0f} W" if over > 1 else "")
    return [
        Tile(label="State", value=word, sub="emulated device" if record.emulated else ""),
        Tile(label="Power", value=number(value["power_w"]), unit="W", sub=cap),
        Tile(label="Temperature", value=number(value["temp_c"]), unit="°C"),
        Tile(label="Utilisation", value=number(100 * value["util"]), unit="%"),
        Tile(label="Clock", value=number(value["clock_mhz"]), unit="MHz"),
        Tile(label="Its share of a step", value=number(value["step_s"], 2), unit="s"),
    ]


def _gpu_chart(records: list[RackRecord], slot: int) -> None:
    records = [record for record in records if slot < record.num_gpus]
    if len(records) < 2:
        st.caption("Its history begins with the second reading.")
        return
    at = np.array([record.at for record in records])
    columns = {}
    for label, name, unit in (("power", "power_w", "W"), ("temperature", "temp_c", "°C")):
        values = np.array([record.column(name)[slot] for record in records], np.float32)
        columns[label] = (values, unit)
    mount("chart", gpu_series(at, columns, 240), "gpu_chart")


def _listed(snapshot: LiveSnapshot, looks: Looks) -> None:
    """What is not healthy or not at its normal cap, in words: for people who do not see the map,
    and to copy ids from.
    """
    names = list(CELL_LOOKS)
    rows: list[Row] = []
    for rack, codes in looks.items():
        record = snapshot.racks[rack]
        for slot in np.flatnonzero(~np.isin(codes, QUIET))[: MAX_LISTED - len(rows)]:
            name = names[codes[slot]]
            rows.append(
                Row(
                    id=f"{rack}/{slot}",
                    cells=(
                        f"{rack}/{slot}",
                        marked(CELL_LOOKS[name]),
                        f"{number(float(record.column('power_w')[slot]))} W",
                        f"{number(float(record.column('cap_w')[slot]))} W",
                        f"{number(float(record.column('temp_c')[slot]))} °C",
                    ),
                )
            )
    heading("GPUs to look at")
    columns = [Column(label="GPU"), Column(label="State")]
    columns += [Column(label=name, kind="right") for name in ("Power", "Cap", "Temperature")]
    empty = "None: every GPU is healthy and at its normal cap."
    table(columns, rows, "racks_listed", label="GPUs to look at", empty=empty)
