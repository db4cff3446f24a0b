"""Move plans: everyone ends with what it needs, from somebody who has it, for the fewest bytes."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import ModelConfig
from runtime.errors import PlanError
from runtime.layout.move import move_plan, source_units
from runtime.layout.sync import buckets, member_replicas, sync_groups
from runtime.layout.takeover import home_holders, takeover
from runtime.layout.units import FAMILIES, STORED_FAMILIES, held_units, unit_elements, without
from runtime.plan.generation import GenerationPlan, Source
from tests.support.engine_layouts import mixes, plan_of, replica_plan, shared_layout

MODEL = ModelConfig()
HOME = home_holders(MODEL, 4)


def sources_of(plan: GenerationPlan, without_gpus: frozenset[str] = frozenset()) -> list[Source]:
    found = []
    for replica in plan.replicas:
        slots = tuple(slot for slot in replica.live if replica.gpus[slot] not in without_gpus)
        gpus = tuple(replica.gpus[slot] for slot in slots)
        found.append(
            Source(replica=replica.replica, gpus=gpus, slots=slots, holders=replica.holders)
        )
    return found


@given(mixes(), st.data())
@settings(max_examples=100, deadline=None)
def test_any_change_of_shape(mix: tuple[ModelConfig, GenerationPlan], data: st.DataObject) -> None:
    model, before = mix
    replicas = []
    for old in before.replicas:
        count = len(old.gpus)
        live = sorted(data.draw(st.frozensets(st.integers(0, count - 1), min_size=1)))
        turns = data.draw(st.sampled_from([1, 2, 4]))
        holders = shared_layout(model, home_holders(model, count), old.holders, live, turns)
        replicas.append(replica_plan(old.replica, count, live, holders))
    after = plan_of(replicas, sources_of(before), generation=2)
    owned = source_units(model, after)
    members = after.members()
    try:
        moves = move_plan(model, after)
    except PlanError:
        alive = [owned[gpu] for gpu in members if gpu in owned]
        assert (
            any(
                len({u for held in alive for u in held[family]}) < len(home)
                for family in STORED_FAMILIES
                for home in [replicas[0].holders[family]]
            )
            or not alive
        )
        return
    received: Counter[tuple[int, str, int]] = Counter()
    for flow in moves.flows:
        assert flow.src != flow.dst
        for family, units in flow.units.items():
            assert set(units) <= set(owned[members[flow.src]][family])
            received.update((flow.dst, family, unit) for unit in units)
    lacking = Counter(
        (base + position, family, unit)
        for base, replica in member_replicas(after)
        for position, slot in enumerate(replica.live)
        for family in FAMILIES
        for unit in held_units(model, replica.holders, slot)[family]
        if unit not in owned.get(replica.gpus[slot], {}).get(family, ())
    )
    assert received == lacking
    assert moves.num_units() == lacking.total()


def test_same_rack_comes_first_then_load_is_spread() -> None:
    whole = [replica_plan(n, 4, range(4), HOME) for n in range(3)]
    # Two replicas lose slot 3: its units come from the third and are spread over its one holder.
    left = takeover(MODEL, HOME, HOME, (0, 1, 2))
    shrunk = [replica_plan(n, 4, (0, 1, 2), left) for n in range(2)]
    plan = plan_of([*shrunk, whole[2]], sources_of(plan_of(whole)), generation=2)
    assert {flow.src for flow in move_plan(MODEL, plan).flows} == {9}
    # A fresh slot 3 takes its own units back from its rack, where every slot holds some of them.
    again = plan_of(whole, sources_of(plan_of([*shrunk, whole[2]])), generation=3)
    flows = move_plan(MODEL, again).flows
    assert {(flow.src, flow.dst) for flow in flows} == {
        *((src, 3) for src in (0, 1, 2)),
        *((src, 7) for src in (4, 5, 6)),
    }


def test_bytes_of_a_move() -> None:
    left = takeover(MODEL, HOME, HOME, (0, 1, 2))
    plan = plan_of(
        [replica_plan(0, 4, (0, 1, 2), left), replica_plan(1, 4, range(4), HOME)],
        sources_of(plan_of([replica_plan(n, 4, range(4), HOME) for n in range(2)])),
    )
    moves = move_plan(MODEL, plan)
    units = Counter({f: sum(len(flow.units[f]) for flow in moves.flows) for f in FAMILIES})
    assert units["attention"] == 4
    assert units["replicated"] == 0
    elements = sum(count * unit_elements(MODEL, family) for family, count in units.items())
    assert moves.num_bytes(MODEL) == elements * 3 * 4


def test_a_unit_that_nobody_holds_is_named() -> None:
    holes = without(HOME, [3])
    left = takeover(MODEL, HOME, holes, (0, 1, 2))
    sources = sources_of(plan_of([replica_plan(0, 4, (0, 1, 2), holes)]))
    with pytest.raises(PlanError, match=r"no member holds attention unit \d+; r0/\d needs it"):
        move_plan(MODEL, plan_of([replica_plan(0, 4, (0, 1, 2), left)], sources))


def test_a_decoded_plan_gives_the_same_moves() -> None:
    whole = plan_of([replica_plan(n, 4, range(4), HOME) for n in range(2)])
    left = takeover(MODEL, HOME, HOME, (0, 1, 2))
    plan = plan_of(
        [replica_plan(0, 4, (0, 1, 2), left), replica_plan(1, 4, range(4), HOME)],
        sources_of(whole),
    )
    decoded = msgspec.json.decode(msgspec.json.encode(plan), type=GenerationPlan)
    assert decoded.digest() == plan.digest()
    assert move_plan(MODEL, decoded) == move_plan(MODEL, plan)


def test_128_replicas_of_72_slots() -> None:
    """The largest shape of the simulator, as a function: 16 replicas lack two slots each."""
    model = ModelConfig(
        num_query_heads=512,
        num_kv_heads=64,
        mlp_hidden=8 * 4096,
        vocab=50257,
        vocab_block=64,
    )
    home = home_holders(model, 72)
    replicas, sources = [], []
    for number in range(128):
        dead = (number, 71 - number) if number < 16 else ()
        live = [slot for slot in range(72) if slot not in dead]
        before = without(home, dead)
        holders = takeover(model, home, before, live) if dead else home
        replicas.append(replica_plan(number, 72, live, holders))
        sources += sources_of(plan_of([replica_plan(number, 72, live, before)]))
    plan = plan_of(replicas, sources)
    groups = sync_groups(model, plan)
    mine = [group for group in groups if 100 in group.ranks]
    assert len(mine) < len(groups) / 20
    assert sum(bucket.elements for bucket in buckets(model, mine, 1 << 22)) > 0
    moved = Counter(dst for flow in move_plan(model, plan).flows for dst in [flow.dst])
    assert set(moved) == set(range(16 * 70))
