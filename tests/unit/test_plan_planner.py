"""The planner: options, recommendation, targets, and what happens unasked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import ClusterConfig, Config, EmulatedConfig, RackConfig, TrainConfig
from runtime.errors import PlanError
from runtime.layout.takeover import home_holders, takeover
from runtime.layout.units import first_turn
from runtime.plan.cost import Calibration
from runtime.plan.planner import Comparison, compare, leave_out, targets
from runtime.plan.situation import Costs, ReplicaSituation, Situation
from storage.records import Option, ReplicaMode

Slots = Mapping[int, Sequence[int]]


def replica(
    config: Config,
    index: int,
    dead: Sequence[int] = (),
    returned: Sequence[int] = (),
    mode: ReplicaMode = "training",
) -> ReplicaSituation:
    """A replica at home but for dead and returned slots, at normal caps, not yet taken over."""
    rack = config.cluster.racks[index]
    home = home_holders(config.model, rack.gpus)
    live = tuple(slot for slot in range(rack.gpus) if slot not in {*dead, *returned})
    return ReplicaSituation(
        replica=index,
        rack=rack.name,
        mode=mode,
        gpus=tuple(f"{rack.name}/{slot}" for slot in range(rack.gpus)),
        home=home,
        holders=home,
        live=live,
        returned=tuple(returned),
        caps_w=tuple(1000.0 if slot in live else 0.0 for slot in range(rack.gpus)),
    )


def situation(
    *,
    dead: Slots | None = None,
    returned: Slots | None = None,
    num_racks: int = 2,
    fractional: Literal["auto", "off"] = "auto",
) -> Situation:
    racks = tuple(RackConfig(name=f"rack-{index}") for index in range(num_racks))
    config = Config(cluster=ClusterConfig(racks=racks), train=TrainConfig(fractional=fractional))
    return Situation(
        config=config,
        replicas=tuple(
            replica(config, index, (dead or {}).get(index, ()), (returned or {}).get(index, ()))
            for index in range(num_racks)
        ),
    )


def after(before: Situation, option: Option) -> Situation:
    """The situation once `option` has been carried out."""
    replicas = tuple(
        msgspec.structs.replace(
            was,
            mode=target.mode,
            live=target.live,
            holders=target.holders,
            caps_w=target.caps_w,
            returned=tuple(slot for slot in was.returned if slot not in target.live),
        )
        for was, target in zip(before.replicas, targets(before, option), strict=True)
    )
    return msgspec.structs.replace(before, replicas=replicas)


def option(comparison: Comparison, kind: str) -> Option:
    return next(option for option in comparison.options if option.kind == kind)


def test_a_dead_slot_lists_every_option() -> None:
    comparison = compare(situation(dead={1: [3]}), 1)
    assert [(o.kind, o.samples, round(o.step_s, 3)) for o in comparison.options] == [
        ("carry_on", (16, 0), 2.0),
        ("shrink", (8, 8), 1.096),
        ("shrink_boost", (8, 8), 1.0),
        ("drop", (16, 0), 2.0),
        ("replace", (0, 0), 0.0),
        ("restart", (8, 8), 1.096),
    ]
    assert comparison.choice.kind == "shrink_boost"
    assert option(comparison, "shrink").shape == (tuple(range(8)), (0, 1, 2, 4, 5, 6, 7))
    assert option(comparison, "carry_on").shape == (tuple(range(8)), ())
    assert option(comparison, "replace").reason == "no spare configured"
    assert option(comparison, "restart").cost_s > 10 * option(comparison, "shrink").cost_s
    assert all(o.title for o in comparison.options)


def test_boost_says_what_it_reaches_and_keeps_the_budget() -> None:
    whole = situation(dead={1: [3]}, fractional="off")
    boost = option(compare(whole, 1), "shrink_boost")
    assert "0.99 of the healthy pace, limited by the GPUs' highest cap" in boost.title
    assert boost.caps_w
    assert all(gpu.startswith("rack-1/") for gpu in boost.caps_w)
    assert sum(boost.caps_w.values()) + (7 - len(boost.caps_w)) * 1000.0 <= 8000.0
    assert boost.goodput == pytest.approx(0.985, abs=1e-3)


def test_sharing_units_by_sample_reaches_what_whole_units_do_not() -> None:
    boost = option(compare(situation(dead={1: [3]}), 1), "shrink_boost")
    assert boost.title.endswith("boost up to 1147 W: 1.00 of the healthy pace")
    assert boost.goodput == pytest.approx(1.0, abs=1e-3)


def test_plain_shrink_when_boost_gains_nothing() -> None:
    stuck = situation(dead={1: [3]})
    host = Calibration(host_s_per_sample=0.08, overhead_s=0.1)
    comparison = compare(msgspec.structs.replace(stuck, calibration=host), 1)
    assert comparison.choice.kind == "shrink"
    top = msgspec.structs.replace(
        stuck.config, emulated=EmulatedConfig(max_cap_w=1000.0, normal_cap_w=1000.0)
    )
    comparison = compare(msgspec.structs.replace(stuck, config=top), 1)
    boost = option(comparison, "shrink_boost")
    assert (boost.feasible, boost.reason) == (False, "the normal cap is the highest the GPUs take")
    assert comparison.choice.kind == "shrink"


def test_a_change_that_costs_more_than_it_brings_is_not_recommended() -> None:
    short = msgspec.structs.replace(
        situation(dead={1: [3]}), costs=Costs(reconfigure_s=60.0, horizon_s=100.0)
    )
    assert compare(short, 1).choice.kind == "carry_on"


def test_returned_gpu_grows_back_to_the_healthy_run() -> None:
    left = situation(dead={1: [3]})
    shrunk = after(left, option(compare(left, 1), "shrink_boost"))
    assert shrunk.replicas[1].trains
    back = msgspec.structs.replace(shrunk.replicas[1], returned=(3,))
    returned = msgspec.structs.replace(shrunk, replicas=(shrunk.replicas[0], back))
    comparison = compare(returned, 1)
    assert [o.kind for o in comparison.options] == ["carry_on", "grow", "drop"]
    assert comparison.choice.kind == "grow"
    assert comparison.choice.caps_w == {}
    whole = after(returned, comparison.choice)
    assert whole.replicas[1].holders == whole.replicas[1].home
    assert compare(whole, 1).choice.goodput == 1.0


def test_two_broken_replicas_are_proposed_one_by_one() -> None:
    both = situation(dead={1: [3], 2: [5]}, num_racks=4)
    first = compare(both, 1)
    assert option(first, "carry_on").samples == (8, 0, 0, 8)
    assert first.choice.shape[2] == ()
    second = compare(after(both, option(first, "shrink")), 2)
    # Either replica alone would still be held up by the other: they are boosted together.
    assert second.choice.kind == "shrink_boost"
    assert second.choice.samples == (4, 4, 4, 4)
    assert {gpu.split("/")[0] for gpu in second.choice.caps_w} == {"rack-1", "rack-2"}
    assert "with replica 1" in second.choice.title
    assert second.choice.step_s < 1.02


def test_the_second_slot_of_a_shrunken_replica() -> None:
    left = situation(dead={1: [3]})
    shrunk = after(left, option(compare(left, 1), "shrink"))
    again = msgspec.structs.replace(shrunk.replicas[1], live=(0, 1, 2, 4, 5, 6))
    broken = msgspec.structs.replace(shrunk, replicas=(shrunk.replicas[0], again))
    assert not again.trains
    assert option(compare(broken, 1), "shrink").shape[1] == (0, 1, 2, 4, 5, 6)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ("shrink", "replica 0 has no dead slot"),
        ("grow", "no GPU of replica 0 has come back"),
        ("replace", "no spare configured"),
        ("drop", ""),
    ],
)
def test_asked_for_by_hand(wanted: str, reason: str) -> None:
    comparison = compare(situation(), 0, wanted=wanted)  # type: ignore[arg-type]
    assert (comparison.choice.kind, comparison.choice.reason) == (wanted, reason)
    if reason:
        with pytest.raises(PlanError, match=reason):
            targets(situation(), comparison.choice)


def test_a_dropped_replica_stands_by_and_can_rejoin() -> None:
    whole = situation()
    dropped = after(whole, compare(whole, 0, wanted="drop").choice)
    assert (dropped.replicas[0].mode, len(dropped.replicas[0].live)) == ("standby", 8)
    rejoin = compare(dropped, 0, wanted="grow").choice
    assert rejoin.feasible
    assert "rejoin" in rejoin.title
    assert after(dropped, rejoin) == whole


def test_the_last_replica_cannot_be_dropped() -> None:
    comparison = compare(situation(dead={1: [3]}), 0, wanted="drop")
    assert comparison.choice.reason == "no other replica trains: the run would stop"


def test_already_so_is_said() -> None:
    left = situation(dead={1: [3]})
    plain = after(left, option(compare(left, 1), "shrink"))
    assert "already trains" in compare(plain, 1, wanted="shrink").choice.reason
    boosted = after(left, option(compare(left, 1), "shrink_boost"))
    assert "already trains" in compare(boosted, 1, wanted="shrink_boost").choice.reason
    assert compare(boosted, 1, wanted="shrink").choice.feasible


def test_unknown_replica() -> None:
    with pytest.raises(PlanError, match="choose 0 to 1"):
        compare(situation(), 2)


def test_a_stale_option_is_refused() -> None:
    before = situation(dead={1: [3]})
    shrink = option(compare(before, 1), "shrink")
    with pytest.raises(PlanError, match=r"slots \[4\] of replica 1 are dead"):
        targets(situation(dead={1: [3, 4]}), shrink)


# unasked ----------------------------------------------------------------------------------------


def test_a_broken_replica_is_left_out_and_keeps_what_it_holds() -> None:
    first, second = leave_out(situation(dead={1: [3]}))
    assert (first.mode, first.num_samples, first.has_holes) == ("training", 16, False)
    assert (second.mode, second.num_samples, second.has_holes) == ("standby", 0, True)
    assert second.live == (0, 1, 2, 4, 5, 6, 7)
    assert second.caps_w[3] == 0.0


def test_all_slots_dead_is_out() -> None:
    first, second = leave_out(situation(dead={1: range(8)}))
    assert (first.mode, second.mode, second.live) == ("training", "out", ())


def test_when_every_replica_is_broken_all_take_over_at_once() -> None:
    broken = situation(dead={0: [0], 1: [3, 4]})
    plans = leave_out(broken)
    assert [plan.mode for plan in plans] == ["training", "training"]
    assert sum(plan.num_samples for plan in plans) == 16
    assert not any(plan.has_holes for plan in plans)


def test_no_live_slot_anywhere() -> None:
    with pytest.raises(PlanError, match="no replica has a live slot"):
        leave_out(situation(dead={0: range(8), 1: range(8)}))


DEAD = st.dictionaries(
    st.integers(min_value=0, max_value=2),
    st.sets(st.integers(min_value=0, max_value=7)),
    max_size=3,
)


def with_slow(was: ReplicaSituation, slow: set[int], factor: float) -> ReplicaSituation:
    found = tuple(sorted(slow & {*was.live, *was.returned}))
    slowness = tuple(factor if slot in found else 1.0 for slot in range(was.num_slots))
    return msgspec.structs.replace(was, slow=found, slowness=slowness)


@given(
    dead=DEAD,
    back=st.dictionaries(st.integers(0, 2), st.sets(st.integers(0, 7))),
    slow=st.dictionaries(st.integers(0, 2), st.sets(st.integers(0, 7))),
    factor=st.sampled_from([1.15, 2.0, 10.0]),
)
def test_every_feasible_option_can_be_carried_out(
    dead: dict[int, set[int]], back: dict[int, set[int]], slow: dict[int, set[int]], factor: float
) -> None:
    returned = {index: sorted(slots - dead.get(index, set())) for index, slots in back.items()}
    now = situation(
        dead={index: sorted(slots) for index, slots in dead.items()}, returned=returned, num_racks=3
    )
    replicas = tuple(with_slow(r, slow.get(r.replica, set()), factor) for r in now.replicas)
    now = msgspec.structs.replace(now, replicas=replicas)
    for index in range(3):
        for each in compare(now, index).options:
            assert each.feasible == (each.reason == "")
            if not each.feasible:
                continue
            assert 0.0 < each.goodput <= 1.0
            assert sum(each.samples) == 16
            plans = targets(now, each)
            for plan, was in zip(plans, now.replicas, strict=True):
                assert (plan.mode == "training") == bool(each.shape[was.replica])
                assert (plan.num_samples == 0) or plan.mode == "training"
                assert sum(plan.caps_w) <= 8000.0
                if plan.mode == "training":
                    whole = takeover(now.config.model, was.home, was.holders, plan.live)
                    assert first_turn(plan.holders) == whole
