"""The index-tensor proof over real ranks: the sum of a row's ids is its id times its holders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime.config import ModelConfig
from runtime.layout.takeover import home_holders
from runtime.layout.units import parameters, without
from tests.support.engine_checks import GQA, UNTIED, small_config
from tests.support.engine_pool import Cluster, Part

HOLES = without(home_holders(GQA, 4), [1])
MIXES: list[tuple[str, ModelConfig, list[int], list[Part]]] = [
    ("healthy", GQA, [4, 4], [Part((0, 1, 2, 3), 4), Part((0, 1, 2, 3), 3)]),
    ("4+3+2", GQA, [4, 4, 4], [Part((0, 1, 2, 3), 3), Part((1, 2, 3), 3), Part((0, 3), 1)]),
    ("unlike racks", UNTIED, [5, 3], [Part((0, 1, 3, 4), 4), Part((0, 2), 3)]),
    ("standby", GQA, [4, 4], [Part((0, 2, 3), 0, "standby", HOLES), Part((0, 1, 3), 7)]),
]


@pytest.mark.parametrize("sync", ["direct", "reshard"])
@pytest.mark.parametrize(
    ("model", "slots", "parts"), [m[1:] for m in MIXES], ids=[m[0] for m in MIXES]
)
def test_every_row_meets_itself(
    cluster: Callable[..., Cluster],
    model: ModelConfig,
    slots: list[int],
    parts: list[Part],
    sync: Any,
) -> None:
    run = cluster(small_config(model, sync=sync), slots)
    run.enter(run.make_plan(parts))
    sums: dict[str, dict[tuple[str, int, int], Any]] = run.everyone("reduce_ids")
    num_holders = Counter(key for rows in sums.values() for key in rows)
    number_of = {(p.name, p.layer): number for number, p in enumerate(parameters(model))}
    for gpu, rows in sums.items():
        for (name, layer, unit), row in rows.items():
            first = number_of[name, layer] * 1_000_000 + unit * row.size + 1
            ids = (first + np.arange(row.size)).reshape(row.shape)
            np.testing.assert_array_equal(
                row, ids * num_holders[name, layer, unit], err_msg=f"{gpu} {name} {layer} {unit}"
            )
