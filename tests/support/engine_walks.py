"""Random walks over shapes: train, change shape, compare with one process, and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from hypothesis import strategies as st

from runtime.config import Config, ModelConfig
from runtime.engine.reference import Reference
from runtime.errors import PlanError
from runtime.layout.move import move_plan
from runtime.layout.units import without
from tests.support.engine_checks import (
    assert_same_params,
    assert_same_units,
    small_config,
    unit_states,
)
from tests.support.engine_pool import Cluster, Part

STEPS = 2
BATCH = 7


@dataclass(frozen=True)
class Walk:
    """shapes: of each generation, (live slots, mode) per replica; shares: of the batch."""

    model: ModelConfig
    sync: Literal["direct", "reshard"]
    fractional: Literal["on", "off"]
    slots: tuple[int, ...]
    shapes: tuple[tuple[tuple[frozenset[int], str], ...], ...]
    shares: tuple[int, ...]

    @property
    def config(self) -> Config:
        return small_config(self.model, BATCH, self.sync, self.fractional)


@st.composite
def walks(draw: st.DrawFn) -> Walk:
    """1 to 3 replicas of 1 to 4 slots; any slots die and come back, replicas stand by."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    model = ModelConfig(
        num_layers=1,
        hidden=12,
        num_query_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=4,
        mlp_hidden=4 * draw(st.sampled_from([3, 5, 7])),
        mlp_block=4,
        vocab=draw(st.sampled_from([256, 259])),
        vocab_block=draw(st.sampled_from([32, 64])),
        tied=draw(st.booleans()),
    )
    slots = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    modes = st.sampled_from(["training", "training", "training", "standby"])
    shape = st.tuples(
        *(
            st.tuples(st.frozensets(st.integers(0, n - 1), min_size=1), modes)
            if number
            else st.tuples(st.frozensets(st.integers(0, n - 1), min_size=1), st.just("training"))
            for number, n in enumerate(slots)
        )
    )
    return Walk(
        model=model,
        sync=draw(st.sampled_from(["direct", "reshard"])),
        fractional=draw(st.sampled_from(["on", "off"])),
        slots=slots,
        shapes=tuple(draw(st.lists(shape, min_size=2, max_size=4))),
        shares=tuple(draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))),
    )


def parts_of(run: Cluster, walk: Walk, shape: Sequence[tuple[frozenset[int], str]]) -> list[Part]:
    """Replicas as `shape` says; the first trains whatever the others leave of the batch."""
    parts: list[Part] = []
    left = BATCH
    for number in reversed(range(len(shape))):
        live, mode = shape[number]
        layout = run.layouts()[number]
        if mode == "standby":
            dead = [slot for slot in range(walk.slots[number]) if slot not in live]
            parts.append(Part(tuple(sorted(live)), 0, "standby", without(layout, dead)))
            continue
        count = left if number == 0 else min(left, walk.shares[number])
        left -= count
        parts.append(Part(tuple(sorted(live)), count))
    return parts[::-1]


def take(walk: Walk, cluster: Callable[[Config, Sequence[int]], Cluster]) -> int:
    """Take the walk and prove every stretch of it; returns how many generations it had.

    A shape that no survivor can supply with state is passed over, as the controller would.
    """
    run = cluster(walk.config, walk.slots)
    reference = Reference(run.config, dtype=torch.float64)
    before: dict[Any, Any] | None = None
    generations = 0
    for shape in walk.shapes:
        applied = generations * STEPS
        members = set(run.plan.members()) if run.plan is not None else set()
        parts = parts_of(run, walk, shape)
        plan = run.make_plan(parts, applied_step=applied)
        joint = set(plan.members())
        try:
            move_plan(walk.model, plan)
        except PlanError:
            continue
        if before is not None and not members & joint:
            continue
        fresh = [gpu for gpu in plan.members() if gpu not in members]
        if before is not None and fresh:
            run.call({gpu: ("new", run.config, gpu, "float64") for gpu in fresh})
        run.enter(plan)
        if before is not None:
            assert_same_units(before, unit_states(run))
        for by_rank in zip(*run.everyone("steps", STEPS).values(), strict=True):
            loss, norm = reference.step()
            for result in by_rank:
                assert result.step == reference.step_number - 1
                np.testing.assert_allclose(
                    [result.loss, result.grad_norm], [loss, norm], rtol=1e-10
                )
                assert result.hash_ok is not False
        assert_same_params(run, reference, atol=1e-9)
        before = unit_states(run)
        generations += 1
    return generations
