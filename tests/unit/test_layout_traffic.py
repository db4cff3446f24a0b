"""Bytes inside a rack: none in a healthy replica under `direct`, there and back under `reshard`."""

from __future__ import annotations

from hypothesis import given, settings

from runtime.config import ModelConfig
from runtime.layout.reshard import flow_bytes, reshard_plan
from runtime.layout.traffic import intra_rack_bytes
from runtime.layout.units import unit_elements
from runtime.plan.generation import GenerationPlan
from tests.support.engine_layouts import mixed_plan, mixes

MODEL = ModelConfig(num_query_heads=64, num_kv_heads=8, mlp_hidden=56 * 8, vocab=56 * 8)
SEVEN = (0, 1, 2, 3, 4, 5, 6)


def test_a_healthy_replica_sends_nothing_under_direct() -> None:
    plan = mixed_plan(MODEL, [8, 8], [range(8), SEVEN])
    direct, reshard = (intra_rack_bytes(MODEL, plan, sync) for sync in ("direct", "reshard"))
    assert direct[0] == 0
    # All that slot 7 holds goes to core slots and comes back: 8 heads, a KV head, 7 + 7 blocks.
    held = {"attention": 8, "kv": 1, "mlp": 7, "vocab": 7}
    elements = sum(count * unit_elements(MODEL, family) for family, count in held.items())
    assert reshard[0] == 2 * 4 * elements
    # In the reduced replica all seven slots share the KV head of the dead one.
    assert direct[1] == 2 * 6 * 4 * unit_elements(MODEL, "kv")


def test_a_uniform_shape_sends_nothing() -> None:
    plan = mixed_plan(MODEL, [8, 8], [range(8), range(8)])
    for sync in ("direct", "reshard"):
        assert set(intra_rack_bytes(MODEL, plan, sync).values()) == {0}


@given(mixes())
@settings(max_examples=60, deadline=None)
def test_every_hand_over_is_counted(mix: tuple[ModelConfig, GenerationPlan]) -> None:
    model, plan = mix
    if all(replica.mode != "training" for replica in plan.replicas):
        return
    total = sum(intra_rack_bytes(model, plan, "reshard", 8).values())
    assert total == 2 * flow_bytes(model, reshard_plan(model, plan).handovers, 8)
