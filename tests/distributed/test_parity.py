"""Training on any mix of shapes equals training in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from runtime.config import Config, ModelConfig, TrainConfig
from runtime.engine.reference import Reference
from runtime.engine.step import StepResult
from runtime.layout.takeover import home_holders
from runtime.layout.units import without
from tests.support.engine_pool import Cluster, Part

GQA = ModelConfig(
    num_layers=2,
    hidden=32,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=4,
    mlp_hidden=13 * 4,
    mlp_block=4,
    vocab=259,
    vocab_block=8,
    tied=True,
)
UNTIED = ModelConfig(
    num_layers=1,
    hidden=24,
    num_query_heads=6,
    num_kv_heads=6,
    head_dim=4,
    mlp_hidden=7 * 8,
    mlp_block=8,
    vocab=257,
    vocab_block=32,
    tied=False,
)


def config(model: ModelConfig, batch: int = 7) -> Config:
    return Config(
        model=model,
        train=TrainConfig(
            seq_len=16,
            global_batch=batch,
            micro_batch=2,
            warmup_steps=3,
            bucket_mb=0.01,
            state_hash_every=2,
        ),
    )


def assert_same_params(cluster: Cluster, reference: Reference, atol: float) -> None:
    """Every unit on every holder against the reference; padded vocabulary rows stay zero."""
    for gpu, units in cluster.everyone("units").items():
        for (name, layer, unit), state in units.items():
            want = reference.params[name, layer][unit].detach().numpy()
            np.testing.assert_allclose(
                state[0], want, rtol=0, atol=atol, err_msg=f"{gpu} {name} {layer} {unit}"
            )


def assert_same_steps(
    results: dict[str, list[StepResult]], reference: Reference, rtol: float
) -> None:
    for number, by_rank in enumerate(zip(*results.values(), strict=True)):
        loss, norm = reference.step()
        for result in by_rank:
            assert result.step == reference.step_number - 1
            assert result.loss == pytest.approx(loss, rel=rtol)
            assert result.grad_norm == pytest.approx(norm, rel=rtol * 10)
            assert result.loss == by_rank[0].loss
            assert result.grad_norm == by_rank[0].grad_norm
            assert result.hash_ok is not False, f"holders disagree after step {number}"
        assert any(result.hash_ok for result in by_rank) == (result.step % 2 == 1)


SHAPES: list[tuple[Any, ...]] = [
    ("4+4", [4, 4], [Part((0, 1, 2, 3), 4), Part((0, 1, 2, 3), 3)]),
    ("4+3", [4, 4], [Part((0, 1, 2, 3), 4), Part((0, 2, 3), 3)]),
    ("4+3+2", [4, 4, 4], [Part((0, 1, 2, 3), 3), Part((1, 2, 3), 3), Part((0, 3), 1)]),
    ("3 alone", [4], [Part((0, 1, 3), 7)]),
]


@pytest.mark.parametrize("model", [GQA, UNTIED], ids=["gqa-tied", "mha-untied"])
@pytest.mark.parametrize(("slots", "parts"), [s[1:] for s in SHAPES], ids=[s[0] for s in SHAPES])
def test_trajectory_in_float64(
    cluster: Callable[..., Cluster], model: ModelConfig, slots: list[int], parts: list[Part]
) -> None:
    run = cluster(config(model), slots)
    run.enter(run.make_plan(parts))
    reference = Reference(run.config, dtype=torch.float64)
    assert_same_steps(run.everyone("steps", 4), reference, rtol=1e-11)
    assert_same_params(run, reference, atol=1e-9)


def test_trajectory_in_float32(cluster: Callable[..., Cluster]) -> None:
    run = cluster(config(GQA), [4, 4], dtype="float32")
    run.enter(run.make_plan([Part((0, 1, 2, 3), 4), Part((0, 1, 3), 3)]))
    reference = Reference(run.config)
    assert_same_steps(run.everyone("steps", 10), reference, rtol=1e-5)
    assert_same_params(run, reference, atol=1e-3)


@pytest.mark.parametrize("model", [GQA, UNTIED], ids=["gqa-tied", "mha-untied"])
def test_standby_with_a_hole_follows(cluster: Callable[..., Cluster], model: ModelConfig) -> None:
    run = cluster(config(model), [4, 4])
    holes = without(home_holders(model, 4), [2])
    run.enter(
        run.make_plan([Part((0, 1, 3), 0, mode="standby", holders=holes), Part((0, 1, 2, 3), 7)])
    )
    reference = Reference(run.config, dtype=torch.float64)
    assert_same_steps(run.everyone("steps", 4), reference, rtol=1e-11)
    assert_same_params(run, reference, atol=1e-9)
    assert run.call({"r0/0": ("work_fraction",)}) == {"r0/0": 0.0}
    assert max(run.call({"r1/0": ("work_fraction",)}).values()) == pytest.approx(2.0)


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
    # A config refuses such a rack; the engine does not depend on that.
    run = cluster(Config(model=model, train=train, cluster=_one_small_rack()), [4, 3])
    run.enter(run.make_plan([Part((0, 1, 2, 3), 2), Part((0, 1, 2), 2)]))
    reference = Reference(run.config, dtype=torch.float64)
    assert_same_steps(run.everyone("steps", 2), reference, rtol=1e-11)
    assert_same_params(run, reference, atol=1e-9)


def _one_small_rack() -> Any:
    from runtime.config import ClusterConfig, RackConfig

    return ClusterConfig(racks=(RackConfig(name="r", gpus=1),))
