"""The index-tensor proof: every gradient element meets itself on every holder, and only itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings

from runtime.config import ModelConfig
from runtime.errors import PlanError
from runtime.layout.sync import (
    SyncGroup,
    buckets,
    canonical_units,
    holder_sets,
    member_replicas,
    runs,
    sync_groups,
)
from runtime.layout.takeover import home_holders
from runtime.layout.units import (
    FAMILIES,
    Held,
    held_units,
    num_units,
    parameters,
    unit_elements,
    without,
)
from runtime.plan.generation import GenerationPlan
from tests.support.engine_layouts import mixed_plan, mixes, plan_of, replica_plan

Ids = npt.NDArray[np.int64]
Mutation = Callable[[tuple[SyncGroup, ...]], tuple[SyncGroup, ...]]


def held_of_all(model: ModelConfig, plan: GenerationPlan) -> list[Held]:
    """What every world rank holds, straight from the plan."""
    return [
        held_units(model, replica.holders, slot)
        for _, replica in member_replicas(plan)
        for slot in replica.live
    ]


def element_ids(model: ModelConfig, held: Held) -> list[Ids]:
    """A rank's shards with every element replaced by the id of the logical element it is."""
    shards, base = [], 0
    for parameter in parameters(model):
        units = np.asarray(held[parameter.family], dtype=np.int64)
        size = parameter.row_elements
        shards.append(base + units[:, None] * size + np.arange(size))
        base += num_units(model, parameter.family) * size
    return shards


def prove(
    model: ModelConfig,
    plan: GenerationPlan,
    max_elements: int,
    mutate: Mutation = lambda groups: groups,
) -> None:
    held = held_of_all(model, plan)
    shards = [element_ids(model, units) for units in held]
    contributions = [[np.zeros(shard.shape, np.int64) for shard in rank] for rank in shards]
    groups = mutate(sync_groups(model, plan))
    everywhere = buckets(model, groups, max_elements)
    for rank, units in enumerate(held):
        # What a rank derives from its own groups is its part of the one global order.
        mine = buckets(model, [g for g in groups if rank in g.ranks], max_elements)
        assert list(mine) == [b for b in everywhere if rank in groups[b.group].ranks]
        for group in groups:
            if rank in group.ranks:
                assert all(set(group.units[f]) <= set(units[f]) for f in FAMILIES)
    for bucket in everywhere:
        messages = []
        for rank in groups[bucket.group].ranks:
            parts = [
                shards[rank][piece.parameter][first:last].ravel()
                for piece in bucket.pieces
                for first, last in _rows(model, held[rank], piece.parameter, piece.units)
            ]
            messages.append(np.concatenate(parts))
            for piece in bucket.pieces:
                for first, last in _rows(model, held[rank], piece.parameter, piece.units):
                    # One all-reduce adds every member's contribution once.
                    contributions[rank][piece.parameter][first:last] += len(
                        groups[bucket.group].ranks
                    )
        assert len(messages[0]) == bucket.elements
        for message in messages[1:]:
            np.testing.assert_array_equal(message, messages[0])
    assert_summed_over_all_holders(model, shards, contributions)


def _rows(
    model: ModelConfig, held: Held, number: int, units: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    return runs(held[parameters(model)[number].family], units)


def assert_summed_over_all_holders(
    model: ModelConfig, shards: list[list[Ids]], contributions: list[list[Ids]]
) -> None:
    total = sum(num_units(model, f) * unit_elements(model, f) for f in FAMILIES)
    num_holders = np.zeros(total, np.int64)
    for rank in shards:
        for shard in rank:
            num_holders[shard.ravel()] += 1
    for rank, sums in zip(shards, contributions, strict=True):
        for shard, got in zip(rank, sums, strict=True):
            wanted = num_holders[shard]
            # A lone holder needs no collective at all.
            np.testing.assert_array_equal(got, np.where(wanted > 1, wanted, 0))


SEVEN = (0, 1, 2, 4, 5, 6, 7)
WIDE = ModelConfig(
    num_layers=1,
    hidden=1,
    num_query_heads=64,
    num_kv_heads=8,
    head_dim=2,
    mlp_hidden=61,
    mlp_block=1,
    vocab=50257,
    vocab_block=64,
)


@given(mixes())
@settings(max_examples=200, deadline=None)
@example((WIDE, mixed_plan(WIDE, [8, 8], [range(8), SEVEN])))
@example((WIDE, mixed_plan(WIDE, [8, 8, 8], [range(8), SEVEN, (0, 2, 3, 6, 7)])))
@example((WIDE, mixed_plan(WIDE, [8, 8, 8], [SEVEN, range(8), (1, 2, 3, 6, 7)], standby=0)))
def test_every_element_meets_itself(mix: tuple[ModelConfig, GenerationPlan]) -> None:
    model, plan = mix
    for max_elements in (40, 1 << 20):
        prove(model, plan, max_elements)


def skip_a_unit(groups: tuple[SyncGroup, ...]) -> tuple[SyncGroup, ...]:
    first = next(group for group in groups if group.units["mlp"])
    units = first.units | {"mlp": first.units["mlp"][1:]}
    return tuple(replace(g, units=units) if g is first else g for g in groups)


def count_a_unit_twice(groups: tuple[SyncGroup, ...]) -> tuple[SyncGroup, ...]:
    return (*groups, replace(groups[0], index=len(groups)))


def forget_a_holder(groups: tuple[SyncGroup, ...]) -> tuple[SyncGroup, ...]:
    return tuple(
        replace(group, ranks=group.ranks[:-1]) if len(group.ranks) > 2 else group
        for group in groups
    )


def give_units_to_the_wrong_owner(groups: tuple[SyncGroup, ...]) -> tuple[SyncGroup, ...]:
    first, *between, last = (group for group in groups if group.units["mlp"])
    swapped = {first.index: last.units, last.index: first.units}
    assert between or first is not last
    return tuple(replace(g, units=swapped.get(g.index, g.units)) for g in groups)


@pytest.mark.parametrize(
    "mutate", [skip_a_unit, count_a_unit_twice, forget_a_holder, give_units_to_the_wrong_owner]
)
def test_the_proof_catches_defects(mutate: Mutation) -> None:
    model = ModelConfig()
    plan = mixed_plan(model, [8, 8, 8], [range(8), SEVEN, (0, 2, 3, 6, 7)])
    prove(model, plan, 1000)
    with pytest.raises((AssertionError, IndexError)):
        prove(model, plan, 1000, mutate)


@given(mixes())
@settings(max_examples=60, deadline=None)
def test_canonical_holders_count_every_unit_once(mix: tuple[ModelConfig, GenerationPlan]) -> None:
    model, plan = mix
    if all(replica.mode != "training" for replica in plan.replicas):
        with pytest.raises(PlanError, match="none trains"):
            canonical_units(model, plan, 0)
        return
    seen: dict[str, list[int]] = defaultdict(list)
    for rank, held in enumerate(held_of_all(model, plan)):
        for family, units in canonical_units(model, plan, rank).items():
            assert set(units) <= set(held[family])
            seen[family] += units
    for family in FAMILIES:
        assert sorted(seen[family]) == list(range(num_units(model, family)))


def test_healthy_replicas_need_one_group_per_slot() -> None:
    model = ModelConfig()
    plan = mixed_plan(model, [8, 8], [range(8), range(8)])
    assert [group.ranks for group in sync_groups(model, plan)] == sorted(
        [tuple(range(16)), *((slot, slot + 8) for slot in range(8))]
    )


def test_a_unit_without_a_holder_is_named() -> None:
    model = ModelConfig()
    holes = without(home_holders(model, 4), [3])
    with pytest.raises(PlanError, match="no rank holds attention unit 12"):
        holder_sets(model, plan_of([replica_plan(0, 4, (0, 1, 2), holes)]))


@pytest.mark.parametrize(
    ("held", "units", "wanted"),
    [
        ((), (), ()),
        ((3, 4, 5, 9), (), ()),
        ((3, 4, 5, 9), (3, 4, 5, 9), ((0, 4),)),
        ((3, 4, 5, 9), (4, 9), ((1, 2), (3, 4))),
    ],
)
def test_runs(held: tuple[int, ...], units: tuple[int, ...], wanted: object) -> None:
    assert runs(held, units) == wanted
