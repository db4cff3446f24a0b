"""Takeover: even shares, fewest moves, everything home after a regrow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import ModelConfig
from runtime.errors import PlanError
from runtime.layout.takeover import home_holders, takeover
from runtime.layout.units import STORED_FAMILIES, held_units, num_units, without
from runtime.layout.work import slot_work, work_by_slot
from runtime.plan.generation import NO_HOLDER, Holders


def model(
    heads: int = 16, kv_heads: int = 8, blocks: int = 43, vocab: int = 256, vocab_block: int = 8
) -> ModelConfig:
    return ModelConfig(
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        mlp_hidden=8 * blocks,
        mlp_block=8,
        vocab=vocab,
        vocab_block=vocab_block,
    )


def counts(holders: Holders, live: Sequence[int]) -> dict[str, list[int]]:
    return {family: [Counter(holders[family])[slot] for slot in live] for family in STORED_FAMILIES}


def assert_even(holders: Holders, live: Sequence[int]) -> None:
    for family, per_slot in counts(holders, live).items():
        assert max(per_slot) - min(per_slot) <= 1, (family, per_slot)
        assert sum(per_slot) == len(holders[family]), family


@pytest.mark.parametrize(
    ("name", "slots", "live", "most"),
    [
        ("64 heads over 7", 8, range(7), {"attention": 10, "mlp": 7}),
        ("16 heads over 7", 8, (0, 1, 2, 4, 5, 6, 7), {"attention": 3, "mlp": 7}),
        ("128 heads over 30", 32, range(2, 32), {"attention": 5}),
        ("50,257 vocabulary", 8, range(1, 8), {"vocab": 113}),
        ("one survivor", 8, (5,), {"attention": 64, "mlp": 43}),
    ],
)
def test_largest_share(name: str, slots: int, live: Sequence[int], most: dict[str, int]) -> None:
    shapes = {
        "16 heads over 7": model(),
        "128 heads over 30": model(heads=128, kv_heads=8, blocks=512),
    }
    config = shapes.get(name, model(heads=64, vocab=50257, vocab_block=64))
    home = home_holders(config, slots)
    after = takeover(config, home, home, live)
    assert_even(after, live)
    for family, count in most.items():
        assert max(counts(after, live)[family]) == count, family


def test_eight_kv_heads_over_seven_slots() -> None:
    config = model(heads=64, kv_heads=8)
    home = home_holders(config, 8)
    after = takeover(config, home, home, range(7))
    held = [held_units(config, after, slot)["kv"] for slot in range(7)]
    assert {head for heads in held for head in heads} == set(range(8))
    # Slot 7's query heads are spread over all, so its key/value head is everywhere.
    assert all(7 in heads for heads in held)


def test_extra_head_and_extra_block_do_not_meet() -> None:
    # 15 heads and 41 blocks over 8: one slot is short of a head, one has an extra block.
    config = model(heads=15, kv_heads=15, blocks=41)
    home = home_holders(config, 8)
    extra_block = counts(home, range(8))["mlp"].index(6)
    assert counts(home, range(8))["attention"][extra_block] == 1
    work = work_by_slot(config, 64, home, 8)
    assert max(work) == 1.0


def test_work_of_a_shrunk_replica() -> None:
    config = model(heads=64, kv_heads=8, blocks=56)
    home = home_holders(config, 8)
    after = takeover(config, home, home, range(7))
    assert slot_work(config, 64, home, 0, num_slots=8) == 1.0
    assert slot_work(config, 64, after, 7, num_slots=8) == 0.0
    # 10 heads of 8, 8 blocks of 7 and two key/value heads instead of one.
    assert 8 / 7 < slot_work(config, 64, after, 0, num_slots=8) < 10 / 8 + 0.1


def test_without_leaves_holes() -> None:
    home = home_holders(model(), 4)
    holes = without(home, [2])
    assert set(holes["mlp"]) == {0, 1, 3, NO_HOLDER}
    for slot in (0, 1, 3):
        assert held_units(model(), holes, slot) == held_units(model(), home, slot)


def test_nobody_left_is_refused() -> None:
    home = home_holders(model(), 4)
    with pytest.raises(PlanError, match="without a live slot"):
        takeover(model(), home, home, ())
    with pytest.raises(PlanError, match="1 slot or more"):
        home_holders(model(), 0)


@st.composite
def histories(draw: st.DrawFn) -> tuple[ModelConfig, int, list[frozenset[int]]]:
    slots = draw(st.integers(1, 9))
    kv_heads = draw(st.integers(1, 8))
    config = model(
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        blocks=draw(st.sampled_from([7, 13, 43, 61])),
        vocab=draw(st.sampled_from([256, 257, 1009])),
        vocab_block=draw(st.sampled_from([8, 64])),
    )
    shapes = draw(
        st.lists(st.frozensets(st.integers(0, slots - 1), min_size=1), min_size=1, max_size=5)
    )
    return config, slots, shapes


@given(histories())
@settings(max_examples=150, deadline=None)
def test_any_history_of_failures_and_repairs(
    history: tuple[ModelConfig, int, list[frozenset[int]]],
) -> None:
    config, slots, shapes = history
    home = home_holders(config, slots)
    assert_even(home, range(slots))
    now = home
    for live in shapes:
        after = takeover(config, home, now, sorted(live))
        assert_even(after, sorted(live))
        for family in STORED_FAMILIES:
            assert len(after[family]) == num_units(config, family)
            assert set(after[family]) <= live
            for was_home, before, slot in zip(
                home[family], now[family], after[family], strict=True
            ):
                if was_home in live:
                    assert slot == was_home
                elif slot != before and before in live:
                    # Only evening out moves a unit between two living slots.
                    assert Counter(now[family])[before] >= Counter(after[family])[slot]
        # Asking again for the same slots moves nothing.
        assert takeover(config, home, after, sorted(live)) == after
        now = after
    assert takeover(config, home, now, range(slots)) == home


@given(st.integers(2, 9), st.data())
@settings(max_examples=60, deadline=None)
def test_a_first_failure_moves_the_dead_slots_units_only(slots: int, data: st.DataObject) -> None:
    config = model(heads=24, kv_heads=4, blocks=61, vocab=1009)
    dead = data.draw(st.integers(0, slots - 1))
    home = home_holders(config, slots)
    after = takeover(config, home, without(home, [dead]), [s for s in range(slots) if s != dead])
    for family in STORED_FAMILIES:
        moved = [u for u, slot in enumerate(home[family]) if slot != after[family][u]]
        assert moved == [u for u, slot in enumerate(home[family]) if slot == dead]
