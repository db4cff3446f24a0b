"""Units shared by sample: training still equals one process, and state moves bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.config import ModelConfig
from runtime.engine.reference import Reference
from runtime.layout.shares import shares_by_slot
from runtime.layout.units import rota, without
from tests.support.engine_checks import (
    GQA,
    ODD,
    UNTIED,
    assert_same_params,
    assert_same_steps,
    assert_same_units,
    small_config,
    unit_states,
)
from tests.support.engine_pool import Cluster, Part

MakeCluster = Callable[..., Cluster]
ALL = (0, 1, 2, 3)
SHAPES: list[tuple[Any, ...]] = [
    ("4+3", ODD, [4, 4], [Part(ALL, 4), Part((0, 2, 3), 3)]),
    ("4+3+2", GQA, [4, 4, 4], [Part(ALL, 3), Part((1, 2, 3), 3), Part((0, 3), 1)]),
    ("5+4", UNTIED, [5, 5], [Part((0, 1, 3, 4), 4), Part((0, 1, 2, 3), 3)]),
    ("3 alone", ODD, [4], [Part((0, 1, 3), 7)]),
]


@pytest.mark.parametrize("sync", ["direct", "reshard"])
@pytest.mark.parametrize(
    ("model", "slots", "parts"), [s[1:] for s in SHAPES], ids=[s[0] for s in SHAPES]
)
def test_trajectory_in_float64(
    cluster: MakeCluster, model: ModelConfig, slots: list[int], parts: list[Part], sync: Any
) -> None:
    run = cluster(small_config(model, sync=sync, fractional="on"), slots)
    plan = run.make_plan(parts)
    assert any(len(rota(r.holders, f)) > 1 for r in plan.replicas for f in ("attention", "mlp"))
    run.enter(plan)
    reference = Reference(run.config, dtype=torch.float64)
    assert_same_steps(run.everyone("steps", 4), reference, rtol=1e-11)
    assert_same_params(run, reference, atol=1e-9)


def test_shrink_drop_and_grow_keep_every_bit(cluster: MakeCluster) -> None:
    run = cluster(small_config(ODD, fractional="on"), [4, 4])
    reference = Reference(run.config, dtype=torch.float64)

    def go_on(applied: int) -> dict[Any, Any]:
        assert_same_steps(run.everyone("steps", 2), reference, rtol=1e-11)
        assert_same_params(run, reference, atol=1e-9)
        assert run.plan is not None
        return unit_states(run)

    run.enter(run.make_plan([Part(ALL, 4), Part(ALL, 3)]))
    before = go_on(2)
    run.enter(run.make_plan([Part((0, 1, 3), 3), Part(ALL, 4)], applied_step=2))
    assert_same_units(before, unit_states(run))
    before = go_on(4)
    # One of the slots that share units fails: the others stand by with what they hold.
    holes = without(run.plan.replicas[0].holders, [1])  # type: ignore[union-attr]
    run.enter(run.make_plan([Part((0, 3), 0, "standby", holes), Part(ALL, 7)], applied_step=4))
    before = go_on(6)
    run.enter(run.make_plan([Part((0, 3), 2), Part((0, 1, 2), 5)], applied_step=6))
    assert_same_units(before, unit_states(run))
    before = go_on(8)
    for gpu in ("r0/1", "r0/2", "r1/3"):
        run.call({gpu: ("new", run.config, gpu, "float64")})
    run.enter(run.make_plan([Part(ALL, 4), Part(ALL, 3)], applied_step=8))
    assert_same_units(before, unit_states(run))
    assert run.layouts() == run.homes
    go_on(10)


def test_slots_report_even_work(cluster: MakeCluster) -> None:
    run = cluster(small_config(ODD, fractional="on"), [4, 4])
    run.enter(run.make_plan([Part(ALL, 4), Part((0, 1, 2), 3)]))
    run.everyone("steps", 1)
    shared = [run.everyone("work_fraction")[f"r1/{slot}"] for slot in (0, 1, 2)]
    whole = cluster(small_config(ODD), [4, 4])
    whole.enter(whole.make_plan([Part(ALL, 4), Part((0, 1, 2), 3)]))
    uneven = [whole.everyone("work_fraction")[f"r1/{slot}"] for slot in (0, 1, 2)]
    assert max(shared) / min(shared) < max(uneven) / min(uneven)
    share = shares_by_slot(run.layouts()[1], "attention", (0, 1, 2))
    assert sum(bool(each.shared) for each in share.values()) > 1
