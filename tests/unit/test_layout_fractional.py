"""Shared units: even work, few copies, and nothing lost whatever happens to the sharers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.config import ModelConfig, TrainConfig
from runtime.layout.fractional import layout_for, max_over_even, num_turns, share_out
from runtime.layout.shares import shares_by_slot
from runtime.layout.takeover import home_holders, takeover
from runtime.layout.units import STORED_FAMILIES, held_by_slot, num_units, rota, without
from runtime.layout.work import work_by_slot
from runtime.plan.generation import NO_HOLDER, Holders

ON = TrainConfig(fractional="on", global_batch=32, micro_batch=16)


def model(heads: int, kv_heads: int, blocks: int = 640) -> ModelConfig:
    return ModelConfig(
        hidden=heads * 8,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        mlp_hidden=8 * blocks,
        mlp_block=8,
        vocab_block=1,
    )


def over_even(config: ModelConfig, holders: Holders, num_slots: int) -> float:
    work = [w for w in work_by_slot(config, 64, holders, num_slots) if w]
    return max(work) * len(work) / sum(work)


@pytest.mark.parametrize(
    ("heads", "slots", "left", "whole"), [(64, 8, 7, 10 / (64 / 7)), (128, 32, 30, 5 / (128 / 30))]
)
def test_work_comes_within_two_percent_of_even(
    heads: int, slots: int, left: int, whole: float
) -> None:
    config = model(heads, 8)
    home = home_holders(config, slots)
    before = takeover(config, home, home, range(left))
    after = layout_for(config, ON, 2, home, home, range(left))
    assert max_over_even(config, before, "attention", 16) == pytest.approx(whole)
    assert max_over_even(config, after, "attention", 16) < 1.02
    assert over_even(config, after, slots) < 1.02
    # An extra head or two on every slot is what it costs.
    most = max(len(held["attention"]) for held in held_by_slot(config, after, range(left)).values())
    assert most <= max(Counter(before["attention"]).values()) + 1


@pytest.mark.parametrize(
    ("units", "slots", "samples", "turns"),
    [(64, 8, 16, 1), (64, 7, 1, 1), (64, 7, 2, 2), (64, 7, 4, 4), (64, 7, 16, 6), (7, 2, 16, 2)],
)
def test_as_few_turns_as_are_worth_it(units: int, slots: int, samples: int, turns: int) -> None:
    assert num_turns(units, slots, samples) == turns


def test_on_off_and_auto() -> None:
    config = model(64, 8, blocks=56)
    home = home_holders(config, 8)

    def layout(fractional: str, **settings: int) -> Holders:
        train = TrainConfig(
            fractional=fractional,  # type: ignore[arg-type]
            **{"global_batch": 32, "micro_batch": 16, **settings},
        )
        return layout_for(config, train, 2, home, home, range(7))

    assert layout("off") == takeover(config, home, home, range(7))
    assert len(rota(layout("on"), "attention")) == 6
    assert len(rota(layout("on"), "mlp")) == 1
    assert layout("auto") == layout("on")
    # One sample at a time cannot be split, and a whole replica has nothing to split.
    assert layout("on", micro_batch=1) == layout("off")
    assert layout_for(config, ON, 2, home, layout("on"), range(8)) == home
    # Where attention is little of the work, there is nothing to gain.
    wide = model(8, 8, blocks=7 * 512)
    at_home = home_holders(wide, 8)
    train = TrainConfig(fractional="auto", global_batch=32, micro_batch=16)
    assert layout_for(wide, train, 2, at_home, at_home, range(6)).keys() == set(STORED_FAMILIES)


def test_a_dead_sharer_leaves_a_hole_only_where_it_was_alone() -> None:
    config = model(64, 8)
    home = home_holders(config, 8)
    shared = layout_for(config, ON, 2, home, home, range(7))
    left = without(shared, [0])
    alone = {
        unit for unit in range(64) if {turn[unit] for turn in rota(shared, "attention")} == {0}
    }
    assert len(alone) == 9
    for turn in rota(left, "attention"):
        assert {unit for unit, slot in enumerate(turn) if slot == NO_HOLDER} == alone
    for slot, held in held_by_slot(config, left, range(1, 7)).items():
        assert held == held_by_slot(config, shared, [slot])[slot]


def test_parts_of_a_slot() -> None:
    holders = {"attention": (0, 0, 1), "attention@1": (0, 1, 1), "mlp": (0,), "vocab": (0,)}
    shares = shares_by_slot(holders, "attention", (0, 1))
    assert (shares[0].num_turns, shares[0].whole) == (2, (0,))
    assert shares[0].shared == ((frozenset({0}), (1,)),)
    assert shares[1].whole == (2,)
    assert shares[1].shared == ((frozenset({1}), (1,)),)
    config = ModelConfig(
        num_query_heads=3, num_kv_heads=3, mlp_hidden=8, mlp_block=8, vocab=8, vocab_block=8
    )
    work = work_by_slot(config, 64, holders, 2)
    plain = work_by_slot(config, 64, holders | {"attention@1": holders["attention"]}, 2)
    assert sum(work) == pytest.approx(sum(plain))
    assert work[1] / plain[1] == pytest.approx(1.5)


@st.composite
def walks(draw: st.DrawFn) -> tuple[ModelConfig, int, list[frozenset[int]]]:
    slots = draw(st.integers(2, 9))
    kv_heads = draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 5))
    config = ModelConfig(
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        mlp_hidden=8 * draw(st.sampled_from([7, 13, 43, 61])),
        mlp_block=8,
    )
    return (
        config,
        slots,
        draw(
            st.lists(st.frozensets(st.integers(0, slots - 1), min_size=1), min_size=1, max_size=5)
        ),
    )


def assert_shared_evenly(config: ModelConfig, holders: Holders, live: Sequence[int]) -> None:
    for family in STORED_FAMILIES:
        turns = rota(holders, family)
        done: Counter[int] = Counter(dict.fromkeys(live, 0))
        for turn in turns:
            assert len(turn) == num_units(config, family)
            assert set(turn) <= set(live)
            per_slot = Counter({slot: turn.count(slot) for slot in live})
            assert max(per_slot.values()) - min(per_slot.values()) <= 1
            done.update(turn)
        # Over all turns, nobody works more than one sample of one unit longer than another.
        assert max(done.values()) - min(done.values()) <= 1


@given(walks())
# Fewer heads than slots; then those who share now are not those who would be chosen anew.
@example((ModelConfig(num_query_heads=2, num_kv_heads=1, mlp_hidden=104), 4, [frozenset(range(3))]))
@settings(max_examples=150, deadline=None)
def test_any_walk_of_shapes(walk: tuple[ModelConfig, int, list[frozenset[int]]]) -> None:
    config, slots, shapes = walk
    home = home_holders(config, slots)
    now = home
    for live in shapes:
        after = layout_for(config, ON, 2, home, now, sorted(live))
        assert_shared_evenly(config, after, sorted(live))
        # Sharing starts from the takeover layout, and asking again moves nothing.
        assert {f: after[f] for f in STORED_FAMILIES} == takeover(config, home, now, sorted(live))
        assert layout_for(config, ON, 2, home, after, sorted(live)) == after
        now = after
    assert layout_for(config, ON, 2, home, now, range(slots)) == home


def test_more_turns_than_samples_are_not_asked_for() -> None:
    config = model(64, 8)
    home = home_holders(config, 8)
    whole = takeover(config, home, home, range(7))
    shared = share_out(config, home, home, whole, range(7), {"attention": 3})
    assert [len(rota(shared, family)) for family in STORED_FAMILIES] == [3, 1, 1]
    assert len({slot for turn in rota(shared, "attention") for slot in (turn[63],)}) <= 3


def test_the_next_shape_is_reached_from_the_present_one_with_fewer_moves() -> None:
    """Who shares a unit now goes on sharing it where that is as even."""
    config = model(128, 8, blocks=172)
    home = home_holders(config, 32)
    now, moved, regardless = home, 0, 0
    live = list(range(32))
    for dead in (5, 17, 29, 11):
        live.remove(dead)
        whole = takeover(config, home, now, live)
        samples = 16
        turns = {
            family: num_turns(num_units(config, family), len(live), samples)
            for family in ("attention", "mlp")
        }
        after = share_out(config, home, now, whole, live, turns)
        moved += received(config, now, after, live)
        regardless += received(config, now, share_out(config, home, home, whole, live, turns), live)
        now = after
    assert moved < 0.95 * regardless


def received(config: ModelConfig, before: Holders, after: Holders, live: Sequence[int]) -> int:
    """Query heads and MLP blocks that slots do not hold yet."""
    old, new = held_by_slot(config, before, live), held_by_slot(config, after, live)
    return sum(len(set(new[s][f]) - set(old[s][f])) for s in live for f in ("attention", "mlp"))
