"""Spares on screen: a state of their own on the map, and in the slot they take."""

from __future__ import annotations

import msgspec
import numpy as np

from app.line import on_the_line
from app.palette import CELL_CODES
from app.rack_filter import QUIET
from app.replica_tables import PACE_COLUMNS, pace_rows
from app.shapes import after_rows, before_rows, rack_looks
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


def test_a_slot_that_only_a_spare_could_fill_is_shown_as_failed_before() -> None:
    before = (records.replica_state(mode="standby", live=(0,), spares=("rack-0/2",)),)
    replace = records.option(
        kind="replace", shape=((0, 1),), samples=(16,), gpus=("rack-0/0", "rack-0/2")
    )
    shrink = records.option(kind="shrink", shape=((0,),), samples=(16,))
    (row,) = before_rows(before, [shrink, replace], 16)
    assert [name for name, _ in row.cells] == ["idle", "failed"]


def test_marks_of_generations_that_were_lost_are_not_drawn() -> None:
    generations = [
        records.formed(seq, generation=number, first_step=first)
        for seq, (number, first) in enumerate([(1, 0), (2, 30), (3, 45), (4, 20), (5, 33)])
    ]
    assert [one.generation for one in on_the_line(generations)] == [1, 4, 5]
