"""Reshard carried out on integers: every holder ends with the sum over all holders, of that element
and no other; and hand-overs are few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings

from runtime.config import ModelConfig
from runtime.errors import PlanError
from runtime.layout.move import Flow
from runtime.layout.reshard import ReshardPlan, flow_bytes, reshard_plan, stages
from runtime.layout.sync import joint_runs, member_replicas
from runtime.layout.units import Held, held_units, num_units, parameters
from runtime.plan.generation import GenerationPlan
from tests.support.engine_layouts import mixed_plan, mixes

Values = dict[tuple[int, int], npt.NDArray[np.int64]]
SEVEN = (0, 1, 2, 4, 5, 6, 7)
WIDE = ModelConfig(
    num_layers=1,
    hidden=1,
    num_query_heads=64,
    num_kv_heads=8,
    head_dim=2,
    mlp_hidden=61,
    mlp_block=1,
    vocab=1009,
    vocab_block=64,
)


def held_of_all(model: ModelConfig, plan: GenerationPlan) -> list[Held]:
    return [
        held_units(model, replica.holders, slot)
        for _, replica in member_replicas(plan)
        for slot in replica.live
    ]


def gradients(model: ModelConfig, held: list[Held]) -> list[Values]:
    """A gradient row of its own for every (parameter, unit) on every rank."""
    rng = np.random.default_rng(0)
    return [
        {
            (number, unit): rng.integers(1, 1 << 40, parameter.row_elements)
            for number, parameter in enumerate(parameters(model))
            for unit in units[parameter.family]
        }
        for units in held
    ]


def carry_out(model: ModelConfig, grads: list[Values], resharding: ReshardPlan) -> list[Values]:
    """The strategy in plain numpy; a row that a rank lacks where it should have it is an error."""
    out: list[Values] = [{} for _ in grads]
    families = [p.family for p in parameters(model)]
    for rank in resharding.norms.ranks:
        for key, _ in grads[rank].items():
            if families[key[0]] == "replicated":
                out[rank][key] = sum(grads[r][key] for r in resharding.norms.ranks)  # type: ignore[assignment]
    groups = resharding.groups[:-1]
    for stage in stages(model, groups, 40):
        for group in groups:
            rows = {
                (number, unit) for number in stage.numbers for unit in group.units[families[number]]
            }
            total: Values = {key: np.zeros_like(_any_row(grads, key)) for key in rows}
            flows = [flow for flow in resharding.handovers if flow.dst in group.ranks]
            moved = [
                (flow, number, unit)
                for flow in flows
                for number in stage.numbers
                for unit in flow.units[families[number]]
                if (number, unit) in rows
            ]
            for rank in group.ranks:
                for key in rows & grads[rank].keys():
                    total[key] += grads[rank][key]
            for flow, number, unit in moved:
                total[number, unit] += grads[flow.src][number, unit]
            for rank in group.ranks:
                for key in rows & grads[rank].keys():
                    out[rank][key] = total[key]
            for flow, number, unit in moved:
                out[flow.src][number, unit] = total[number, unit]
    return out


def _any_row(grads: list[Values], key: tuple[int, int]) -> npt.NDArray[np.int64]:
    return next(rows[key] for rows in grads if key in rows)


def prove(
    model: ModelConfig,
    plan: GenerationPlan,
    mutate: Callable[[ReshardPlan], ReshardPlan] = lambda p: p,
) -> None:
    grads = gradients(model, held_of_all(model, plan))
    result = carry_out(model, grads, mutate(reshard_plan(model, plan)))
    for rank, rows in enumerate(grads):
        assert rows.keys() == result[rank].keys()
        for key in rows:
            wanted = sum(other[key] for other in grads if key in other)
            np.testing.assert_array_equal(result[rank][key], wanted, err_msg=f"{rank} {key}")


@given(mixes())
@settings(max_examples=100, deadline=None)
@example((WIDE, mixed_plan(WIDE, [8, 8], [range(8), SEVEN])))
@example((WIDE, mixed_plan(WIDE, [8, 8, 8], [range(8), SEVEN, (0, 2, 3, 6, 7)])))
@example((WIDE, mixed_plan(WIDE, [8, 8, 8], [SEVEN, range(8), (1, 2, 3, 6, 7)], standby=2)))
def test_every_holder_ends_with_the_sum(mix: tuple[ModelConfig, GenerationPlan]) -> None:
    model, plan = mix
    if all(replica.mode != "training" for replica in plan.replicas):
        with pytest.raises(PlanError, match="none trains"):
            reshard_plan(model, plan)
        return
    prove(model, plan)
    resharding = reshard_plan(model, plan)
    assert resharding.degree == min(r.degree for r in plan.replicas if r.mode == "training")
    for family in ("attention", "kv", "mlp", "vocab"):
        summed = [unit for group in resharding.groups for unit in group.units[family]]
        assert sorted(summed) == list(range(num_units(model, family)))


def lose_a_row(plan: ReshardPlan) -> ReshardPlan:
    first, *others = plan.handovers
    family = next(f for f, units in first.units.items() if units)
    return replace(
        plan,
        handovers=(
            replace(first, units=first.units | {family: first.units[family][1:]}),
            *others,
        ),
    )


def hand_over_twice(plan: ReshardPlan) -> ReshardPlan:
    return replace(plan, handovers=(*plan.handovers, plan.handovers[0]))


def hand_to_the_wrong_core(plan: ReshardPlan) -> ReshardPlan:
    flow = next(flow for flow in plan.handovers)
    other = next(f.dst for f in plan.handovers if f.dst != flow.dst)
    return replace(plan, handovers=(Flow(flow.src, other, flow.units), *plan.handovers[1:]))


def forget_a_core(plan: ReshardPlan) -> ReshardPlan:
    first, *others = plan.groups
    return replace(plan, groups=(replace(first, ranks=first.ranks[1:]), *others))


@pytest.mark.parametrize(
    "mutate", [lose_a_row, hand_over_twice, hand_to_the_wrong_core, forget_a_core]
)
def test_the_proof_catches_defects(mutate: Callable[[ReshardPlan], ReshardPlan]) -> None:
    plan = mixed_plan(WIDE, [8, 8, 8], [range(8), SEVEN, (0, 2, 3, 6, 7)])
    with pytest.raises((AssertionError, KeyError)):
        prove(WIDE, plan, mutate)


def test_a_healthy_replica_hands_over_what_its_extra_slot_holds() -> None:
    plan = mixed_plan(WIDE, [8, 8], [range(8), SEVEN])
    resharding = reshard_plan(WIDE, plan)
    assert resharding.degree == 7
    healthy = [flow for flow in resharding.handovers if flow.src < 8]
    # Slot 3 is the extra one; the others stand for themselves.
    assert {flow.src for flow in healthy} == {3}
    home = held_units(WIDE, plan.replicas[0].holders, 3)
    assert sum(len(flow.units["mlp"]) for flow in healthy) == len(home["mlp"])
    assert flow_bytes(WIDE, healthy) > 0


def test_equal_layouts_hand_nothing_over() -> None:
    for live in (range(8), SEVEN):
        resharding = reshard_plan(WIDE, mixed_plan(WIDE, [8, 8], [live, live]))
        assert not [
            flow for flow in resharding.handovers if any(flow.units[f] for f in ("mlp", "vocab"))
        ]


def test_stages_close_where_the_largest_position_is_full() -> None:
    model = ModelConfig()
    groups = reshard_plan(model, mixed_plan(model, [4, 4], [range(4), (0, 1, 2)])).groups[:-1]
    whole = stages(model, groups, 1 << 40)
    assert len(whole) == 1
    sharded = [n for n, p in enumerate(parameters(model)) if p.family != "replicated"]
    for limit in (1, 1000, 20_000):
        cut = stages(model, groups, limit)
        assert [number for stage in cut for number in stage.numbers] == sharded[::-1]
        assert [stage.ready for stage in cut] == sorted(stage.ready for stage in cut)
    assert len(stages(model, groups, 1)) == len(sharded)


@pytest.mark.parametrize(
    ("ours", "theirs", "units", "wanted"),
    [
        ((), (), (), ()),
        ((1, 2, 3), (0, 1, 2, 3), (1, 2, 3), ((0, 1, 3),)),
        ((1, 2, 3, 7), (1, 3, 7), (1, 3, 7), ((0, 0, 1), (2, 1, 2))),
    ],
)
def test_joint_runs(
    ours: tuple[int, ...], theirs: tuple[int, ...], units: tuple[int, ...], wanted: object
) -> None:
    assert joint_runs(ours, theirs, units) == wanted
