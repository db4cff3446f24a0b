"""Small models and the comparison with one process that the engine's tests share."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from runtime.config import ClusterConfig, Config, ModelConfig, RackConfig, TrainConfig
from runtime.engine.reference import Reference
from runtime.engine.step import StepResult
from tests.support.engine_pool import Cluster

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
# 10 heads and 13 blocks: remainders over 3 and over 4 slots.
ODD = ModelConfig(
    num_layers=2,
    hidden=20,
    num_query_heads=10,
    num_kv_heads=5,
    head_dim=4,
    mlp_hidden=13 * 4,
    mlp_block=4,
    vocab=259,
    vocab_block=8,
)


# The engine goes by the plan; only the config's own check needs a rack that fits.
ONE_GPU = ClusterConfig(racks=(RackConfig(name="r", gpus=1),))


def small_config(
    model: ModelConfig,
    batch: int = 7,
    sync: Literal["direct", "reshard"] = "direct",
    fractional: Literal["auto", "on", "off"] = "off",
) -> Config:
    """fractional: micro-batches are then large enough to be split between slots."""
    return Config(
        model=model,
        cluster=ONE_GPU,
        train=TrainConfig(
            seq_len=16,
            global_batch=batch,
            micro_batch=2 if fractional == "off" else 4,
            warmup_steps=3,
            bucket_mb=0.01,
            state_hash_every=2,
            sync=sync,
            fractional=fractional,
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


def unit_states(
    cluster: Cluster, trusted: set[str] | None = None
) -> dict[tuple[str, int, int], Any]:
    """State of every unit, after checking that all its holders hold the same bits.

    trusted: the GPUs that count; all by default.
    """
    found: dict[tuple[str, int, int], Any] = {}
    for gpu, units in cluster.everyone("units").items():
        if trusted is not None and gpu not in trusted:
            continue
        for key, state in units.items():
            other = found.setdefault(key, state)
            assert np.array_equal(other, state), f"{gpu} differs in {key}"
    return found


def assert_same_units(
    before: dict[tuple[str, int, int], Any], after: dict[tuple[str, int, int], Any]
) -> None:
    assert before.keys() == after.keys()
    for key, state in before.items():
        assert np.array_equal(state, after[key]), key
