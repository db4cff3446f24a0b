"""Spares on screen: a state of their own on the map, and in the slot they take."""

from __future__ import annotations

import msgspec
import numpy as np

from app.palette import CELL_CODES
from app.rack_filter import QUIET
from app.replica_tables import PACE_COLUMNS, pace_rows
from app.shapes import after_rows, rack_looks
from tests.contract import records


def test_a_living_spare_is_drawn_as_one_and_a_dead_one_as_failed() -> None:
    replica = records.replica_state(spares=("rack-0/2",))
    states = bytes([0, 0, 0, 4])
    rack = records.rack("rack-0", gpus=4, states=states)
    looks = rack_looks({"rack-0": rack}, [replica])["rack-0"]
    names = list(CELL_CODES)
    assert [names[code] for code in looks[2:]] == ["spare", "failed"]
    assert np.isin(looks, QUIET).tolist()[2:] == [True, False]


def test_the_shape_after_a_replacement_names_the_spare() -> None:
    before = (records.replica_state(mode="standby", live=(0,), spares=("rack-0/2",)),)
    option = records.option(
        kind="replace", shape=((0, 1),), samples=(16,), gpus=("rack-0/0", "rack-0/2")
    )
    (row,) = after_rows(before, option)
    assert row.cells == (("healthy", "rack-0/0"), ("healthy", "rack-0/2"))


def test_the_replicas_table_lists_them() -> None:
    state = records.run_state(replicas=(records.replica_state(spares=("rack-0/2",)),))
    at = [column.label for column in PACE_COLUMNS].index("Spares")
    assert pace_rows(state, {}, {})[0].cells[at] == "rack-0/2"
    none = msgspec.structs.replace(state, replicas=(records.replica_state(),))
    assert pace_rows(none, {}, {})[0].cells[at] == "none"
