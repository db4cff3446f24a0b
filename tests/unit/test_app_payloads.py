"""What the components are given: shapes, the fleet's packed blob, chart payloads."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
from streamlit.components.v2.component_manager import BidiComponentManager

from app.components.fleet import LENSES, NO_VALUE, pack
from app.components.registry import NAMES, register
from app.figures import MAX_POINTS, loss_and_pace, thinned
from app.palette import CELL_CODES
from app.rack_filter import RackQuery, in_order, matches, ordered
from app.replica_tables import pace_rows, slowest_slot, unit_table, which_units
from app.shapes import after_rows, before_rows, most_pressing, natural, rack_looks, shape_rows
from app.tail import StepSeries
from storage.holdings import Holdings, SharedUnit
from storage.live.memory import MemoryStore
from storage.records import RackRecord
from tests.support.feeder import Feeder


@pytest.fixture
def feeder() -> Feeder:
    feeder = Feeder(MemoryStore(), prefill=5)
    feeder.begin()
    return feeder


def _racks(feeder: Feeder) -> dict[str, RackRecord]:
    feeder._publish()
    return feeder.store.get_racks(feeder.run)


def test_looks_follow_state_boost_and_mode(feeder: Feeder) -> None:
    feeder.fault("r1/3", "kill")
    looks = rack_looks(_racks(feeder), feeder._states())
    assert set(looks["r0"]) == {CELL_CODES["healthy"]}
    assert looks["r1"][3] == CELL_CODES["failed"]
    assert looks["r1"][0] == CELL_CODES["idle"]
    feeder.replicas[1].mode = "training"
    feeder.replicas[1].gpus[0].cap_w = 860.0
    looks = rack_looks(_racks(feeder), feeder._states())
    assert looks["r1"][0] == CELL_CODES["boosted"]
    rows = shape_rows(feeder._states(), 32, looks)
    assert [name for name, _ in rows[1].cells][:4] == ["boosted", "healthy", "healthy", "failed"]
    assert rows[1].right.startswith("7 of 8 slots")


def test_before_and_after_of_a_proposal(feeder: Feeder) -> None:
    feeder.fault("r1/3", "kill")
    proposal = feeder.proposal
    assert proposal is not None
    before = before_rows(proposal.before, proposal.options, 32)
    assert [name for name, _ in before[1].cells] == ["idle"] * 3 + ["failed"] + ["idle"] * 4
    boost = next(one for one in proposal.options if one.kind == "shrink_boost")
    after = after_rows(proposal.before, boost)
    assert [name for name, _ in after[1].cells] == ["boosted"] * 3 + ["dead"] + ["boosted"] * 4
    drop = next(one for one in proposal.options if one.kind == "drop")
    assert after_rows(proposal.before, drop)[1].right == "left out, 0 samples"


def test_most_pressing_replicas_come_first() -> None:
    feeder = Feeder(MemoryStore(), num_racks=40, num_slots=4, prefill=1)
    feeder.begin()
    feeder.fault("r39/1", "kill")
    shown, note = most_pressing(feeder._states(), 3)
    assert [one.replica for one in shown] == [0, 1, 39]
    assert note == "37 more replicas are not shown; 37 of them are whole."


def test_racks_sort_as_people_count() -> None:
    names = ["rack-10", "rack-2", "a", "rack-1"]
    assert sorted(names, key=natural) == ["a", "rack-1", "rack-2", "rack-10"]


@pytest.mark.parametrize("lens", LENSES, ids=lambda lens: lens.id)
def test_blob_has_one_look_and_one_value_a_gpu(feeder: Feeder, lens: object) -> None:
    racks = _racks(feeder)
    looks = rack_looks(racks, feeder._states())
    blob = pack(racks, looks, lens, "r0/1")  # type: ignore[arg-type]
    (length,) = struct.unpack_from("<I", blob)
    head = json.loads(blob[4 : 4 + length])
    assert [rack["gpus"] for rack in head["racks"]] == [8, 8]
    assert head["selected"] == "r0/1"
    values = np.frombuffer(blob[4 + length + 16 :], "<u2")
    assert len(values) == 16
    if head["lens"]["id"] == "power":
        high = head["lens"]["high"]
        shown = values[:8] / (NO_VALUE - 1) * high
        assert np.allclose(shown, racks["r0"].column("power_w"), atol=high / 60000)
    else:
        # Emulated devices count no ECC errors
        assert (values == NO_VALUE).all() == (head["lens"]["id"] in ("state", "ecc"))


def test_thinning_keeps_fixed_steps_and_the_newest() -> None:
    step = np.arange(1, 3_001)
    before, after = thinned(step), thinned(np.arange(1, 3_002))
    assert before.sum() <= MAX_POINTS
    assert before[-1]
    assert list(step[before][:-1]) == list(np.arange(1, 3_002)[after][: before.sum() - 1])


def test_chart_survives_nan_and_nothing() -> None:
    empty = loss_and_pace(StepSeries(), 0.0, 400)
    assert empty["layout"]["shapes"] == []
    series = StepSeries(
        step=np.array([1, 2]), loss=np.array([np.nan, 2.0]), tokens_per_s=np.array([1.0, 2.0])
    )
    encoded = loss_and_pace(series, 10.0, 400)["traces"][0]["y"]
    decoded = np.frombuffer(base64.b64decode(encoded["bdata"]), "<f4")
    assert np.isnan(decoded[0])
    assert decoded[1] == 2.0


def test_component_files_are_found_without_an_install() -> None:
    manager = BidiComponentManager()
    register(manager)
    register(manager)
    for name in NAMES:
        folder = manager.get_component_path(f"counterpoise.{name}")
        assert folder is not None
        assert (Path(folder) / f"{name}.js").is_file()
    library = manager.get_component_path("counterpoise-plotly.asset")
    assert library is not None
    assert (Path(library) / "plotly.min.js").is_file()


def test_a_filter_dims_what_it_leaves_out(feeder: Feeder) -> None:
    feeder.fault("r1/3", "kill")
    racks = _racks(feeder)
    looks = rack_looks(racks, feeder._states())
    by_state = matches(racks, looks, RackQuery(states=("failed",)))
    assert {name: list(np.flatnonzero(mask)) for name, mask in by_state.items()} == {"r1": [3]}
    by_slot = matches(racks, looks, RackQuery(search="R1/3"))
    assert {name: list(np.flatnonzero(mask)) for name, mask in by_slot.items()} == {"r1": [3]}
    assert set(matches(racks, looks, RackQuery(search="r"))) == {"r0", "r1"}
    blob = pack(racks, looks, LENSES[0], None, by_state)
    (length,) = struct.unpack_from("<I", blob)
    codes = np.frombuffer(blob[4 + length : 4 + length + 8], np.uint8)
    assert [int(code) >> 7 for code in codes] == [1, 1, 1, 0, 1, 1, 1, 1]
    assert codes[3] == CELL_CODES["failed"]


def test_an_order_is_taken_once_and_kept(feeder: Feeder) -> None:
    feeder.fault("r1/3", "kill")
    racks = _racks(feeder)
    looks = rack_looks(racks, feeder._states())
    assert ordered(racks, looks, "name") == ("r0", "r1")
    order = ordered(racks, looks, "most to look at")
    assert order == ("r1", "r0")
    assert list(in_order(racks, ("r1",))) == ["r1", "r0"]


def test_replicas_say_who_is_slow_and_what_changed(feeder: Feeder) -> None:
    feeder.fault("r0/5", "slow", 1.4)
    before = {one.replica: one for one in feeder._states()}
    feeder.replicas[1].live.remove(3)
    racks = _racks(feeder)
    state = feeder.store.get_run(feeder.run)
    assert state is not None
    rows = pace_rows(state, racks, before)
    assert slowest_slot(state.replicas[0], racks) == "5 (1.40 ×)"
    degree = rows[1].cells[2]
    assert (degree["text"], degree["title"]) == ("7 of 8", "before the last change: 8 of 8")
    _, units = unit_table(state.replicas[1], before[1])
    heads = units[0].cells
    assert heads[4]["text"] == "–"
    assert heads[4]["title"] == "before the last change: 2"
    _, same = unit_table(state.replicas[0], before[0])
    assert all(isinstance(cell, str) for row in same for cell in row.cells)


def test_which_units_each_slot_holds(feeder: Feeder) -> None:
    (table,) = which_units(feeder._states())
    assert table[0] == "Replicas 0, 1"
    assert [row.cells for row in table[2]][7] == ("7", "14–15", "38–42", "28–31")
    at_home, reduced = feeder._states()
    shared = SharedUnit(unit=15, turns=(0, 1, 2, 4, 5, 0))
    alone = {
        "attention": (((0, 1), (14, 14)), ((2, 3),), ((4, 5),), (), ((8, 9),), (), (), ()),
    }
    reduced = msgspec.structs.replace(
        reduced,
        live=(0, 1, 2, 4, 5, 6, 7),
        units={"attention": (3, 2, 2, 0, 2, 0, 0, 0)},
        holdings=Holdings(alone=alone, shared={"attention": (shared,)}),
    )
    home, other = which_units([at_home, reduced])
    assert (home[0], other[0]) == ("Replica 0", "Replica 1")
    held = [row.cells[1] for row in other[2]]
    assert held[0] == "0–1, 14 + 15 (2 of 6)"
    assert (held[3], held[5], held[6]) == ("–", "15 (1 of 6)", "–")
