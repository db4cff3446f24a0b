"""Training on any mix of shapes equals training in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.config import Config, ModelConfig, TrainConfig
from runtime.engine.reference import Reference
from runtime.layout.takeover import home_holders
from runtime.layout.units import without
from tests.support.engine_checks import (
    GQA,
    ONE_GPU,
    UNTIED,
    assert_same_params,
    assert_same_steps,
    small_config,
)
from tests.support.engine_pool import Cluster, Part

SHAPES: list[tuple[Any, ...]] = [
    ("4+4", [4, 4], [Part((0, 1, 2, 3), 4), Part((0, 1, 2, 3), 3)]),
    ("4+3", [4, 4], [Part((0, 1, 2, 3), 4), Part((0, 2, 3), 3)]),
    ("4+3+2", [4, 4, 4], [Part((0, 1, 2, 3), 3), Part((1, 2, 3), 3), Part((0, 3), 1)]),
    ("3 in two ways", [4, 4], [Part((0, 1, 2), 4), Part((0, 2, 3), 3)]),
    ("5+3+1", [5, 4, 4], [Part((0, 1, 2, 3, 4), 4), Part((1, 2, 3), 2), Part((2,), 1)]),
    ("3 alone", [4], [Part((0, 1, 3), 7)]),
]


@pytest.mark.parametrize("sync", ["direct", "reshard"])
@pytest.mark.parametrize("model", [GQA, UNTIED], ids=["gqa-tied", "mha-untied"])
@pytest.mark.parametrize(("slots", "parts"), [s[1:] for s in SHAPES], ids=[s[0] for s in SHAPES])
def test_trajectory_in_float64(
    cluster: Callable[..., Cluster],
    model: ModelConfig,
    slots: list[int],
    parts: list[Part],
    sync: Any,
) -> None:
    run = cluster(small_config(model, sync=sync), slots)
    run.enter(run.make_plan(parts))
    reference = Reference(run.config, dtype=torch.float64)
    assert_same_steps(run.everyone("steps", 4), reference, rtol=1e-11)
    assert_same_params(run, reference, atol=1e-9)


def test_trajectory_in_float32(cluster: Callable[..., Cluster]) -> None:
    run = cluster(small_config(GQA), [4, 4], dtype="float32")
    run.enter(run.make_plan([Part((0, 1, 2, 3), 4), Part((0, 1, 3), 3)]))
    reference = Reference(run.config)
    assert_same_steps(run.everyone("steps", 10), reference, rtol=1e-5)
    assert_same_params(run, reference, atol=1e-3)


@pytest.mark.parametrize("sync", ["direct", "reshard"])
@pytest.mark.parametrize("model", [GQA, UNTIED], ids=["gqa-tied", "mha-untied"])
def test_standby_with_a_hole_follows(
    cluster: Callable[..., Cluster], model: ModelConfig, sync: Any
) -> None:
    run = cluster(small_config(model, sync=sync), [4, 4])
    holes = without(home_holders(model, 4), [2])
    run.enter(
        run.make_plan([Part((0, 1, 3), 0, mode="standby", holders=holes), Part((0, 1, 2, 3), 7)])
    )
    reference = Reference(run.config, dtype=torch.float64)
    assert_same_steps(run.everyone("steps", 4), reference, rtol=1e-11)
    assert_same_params(run, reference, atol=1e-9)
    fractions = run.everyone("work_fraction")
    assert fractions["r0/0"] == 0.0
    assert max(fractions.values()) == pytest.approx(2.0)


def test_more_slots_than_units(cluster: Callable[..., Cluster]) -> None:
    """Empty shards are legal: 2 query heads, 3 MLP blocks and 2 vocabulary blocks over 4 slots."""
    model = ModelConfig(
        num_layers=2,
        hidden=16,
        num_query_heads=2,
        num_kv_heads=1,
        head_dim=4,
        mlp_hidden=12,
        mlp_block=4,
        vocab=256,
        vocab_block=128,
        tied=True,
    )
    train = TrainConfig(seq_len=16, global_batch=4, state_hash_every=2)
    run = cluster(Config(model=model, train=train, cluster=ONE_GPU), [4, 3])
    run.enter(run.make_plan([Part((0, 1, 2, 3), 2), Part((0, 1, 2), 2)]))
    reference = Reference(run.config, dtype=torch.float64)
    assert_same_steps(run.everyone("steps", 2), reference, rtol=1e-11)
    assert_same_params(run, reference, atol=1e-9)
