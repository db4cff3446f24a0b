"""The power curve, the emulated device and the governor."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import EmulatedConfig
from runtime.errors import PlanError
from runtime.power.curve import PEAK_PERF, PEAK_RATIO, perf, power_for
from runtime.power.emulated import EmulatedDevice, share_s, steady_c, sustained_w
from runtime.power.governor import RackPower, plan_caps
from runtime.power.port import CapError, PowerBackend, PowerLimits

CONFIG = EmulatedConfig()
LIMITS = PowerLimits(min_w=200.0, normal_w=1000.0, max_w=1300.0)


@pytest.mark.parametrize(
    ("ratio", "pace"), [(1.0, 1.0), (1.1, 1.069), (1.2, 1.122), (1.3, 1.156), (0.0, 0.0)]
)
def test_curve_points_of_facts_4(ratio: float, pace: float) -> None:
    assert perf(ratio) == pytest.approx(pace, abs=6e-4)


@pytest.mark.parametrize(
    ("healthy", "live", "ratio"),
    [
        (32, 30, 1.10),
        (32, 28, 1.26),
        (72, 71, 1.02),
        (72, 70, 1.04),
        (72, 68, 1.08),
        (72, 64, 1.21),
        (8, 7, 1.26),
    ],
)
def test_boost_that_the_paper_needs(healthy: int, live: int, ratio: float) -> None:
    assert power_for(healthy / live) == pytest.approx(ratio, abs=0.006)


def test_tp27_of_32_is_out_of_reach() -> None:
    with pytest.raises(PlanError, match="out of reach"):
        power_for(32 / 27)


@given(st.floats(min_value=0.05, max_value=1.39), st.floats(min_value=0.001, max_value=0.5))
def test_curve_is_monotone_and_concave(ratio: float, width: float) -> None:
    assert perf(ratio + width) >= perf(ratio)
    assert perf(ratio + width / 2) >= (perf(ratio) + perf(ratio + width)) / 2 - 1e-12
    assert perf(2.0) == perf(PEAK_RATIO) == PEAK_PERF


@given(st.floats(min_value=0.0, max_value=PEAK_PERF))
def test_power_for_inverts_the_curve(pace: float) -> None:
    assert perf(power_for(pace)) == pytest.approx(pace, abs=1e-9)
    assert perf(power_for(pace)) >= pace - 1e-15


# the emulated device ---------------------------------------------------------------------------


def test_share_of_a_step() -> None:
    assert share_s(CONFIG, 1.0, 8, 8, 1.0) == CONFIG.step_s
    assert share_s(CONFIG, 8 / 7, 7, 8, 1.0) == pytest.approx(CONFIG.step_s)
    assert share_s(CONFIG, 1.0, 16, 8, 0.5) == pytest.approx(4 * CONFIG.step_s)
    assert share_s(CONFIG, 0.0, 16, 8, 0.0) == 0.0
    with pytest.raises(PlanError):
        share_s(CONFIG, 1.0, 8, 8, 0.0)


def test_boost_shows_in_pace_watts_degrees_and_clocks() -> None:
    normal, boosted = EmulatedDevice(CONFIG), EmulatedDevice(CONFIG)
    boosted.set_cap(1260.0)
    at_normal, at_boost = normal.advance(600.0, 1.0), boosted.advance(600.0, 1.0)
    assert (at_normal.power_w, at_boost.power_w) == (1000.0, 1260.0)
    assert at_normal.temp_c == pytest.approx(65.0)
    assert at_boost.temp_c == pytest.approx(74.6, abs=0.1)
    assert at_boost.clock_mhz / at_normal.clock_mhz == pytest.approx(1.1447, abs=1e-3)
    assert boosted.speed() == pytest.approx(1.1447, abs=1e-3)


def test_slowness_divides_the_pace() -> None:
    device = EmulatedDevice(CONFIG)
    device.set_slowness(2.0)
    assert device.speed() == 0.5
    for factor in (0.5, math.inf, math.nan):
        with pytest.raises(PlanError, match=r"1\.0 or more"):
            device.set_slowness(factor)


@pytest.mark.parametrize("cap_w", [199.0, 1301.0, math.nan, -1.0])
def test_caps_outside_the_limits_are_refused(cap_w: float) -> None:
    device: PowerBackend = EmulatedDevice(CONFIG)
    with pytest.raises(CapError, match="200 to 1300 W"):
        device.set_cap(cap_w)
    assert device.read().cap_w == 1000.0


def test_starts_idle_and_cool() -> None:
    reading = EmulatedDevice(CONFIG).read()
    assert reading.power_w == CONFIG.idle_w
    assert reading.temp_c == pytest.approx(steady_c(CONFIG, CONFIG.idle_w))
    assert reading.clock_mhz == 345.0


def test_throttles_softly_and_settles_above_the_throttle_temperature() -> None:
    hot = EmulatedConfig(thermal_resistance_c_per_w=0.06)
    device = EmulatedDevice(hot)
    device.set_cap(1300.0)
    paces = []
    for _ in range(400):
        device.advance(1.0, 1.0)
        paces.append(device.speed())
    assert paces[0] == pytest.approx(perf(1.3))
    assert 0.4 * perf(1.3) < paces[-1] < perf(1.3)
    assert abs(paces[-1] - paces[-2]) < 1e-4
    assert hot.throttle_c < device.temp_c < hot.throttle_c + 10.0
    assert sustained_w(hot) == pytest.approx(950.0)
    assert sustained_w(CONFIG) == CONFIG.max_cap_w


@given(
    st.floats(min_value=0.0, max_value=100.0),
    st.floats(min_value=-1.0, max_value=2.0),
    st.floats(min_value=200.0, max_value=1300.0),
)
def test_readings_stay_physical(dt_s: float, util: float, cap_w: float) -> None:
    device = EmulatedDevice(CONFIG)
    device.set_cap(cap_w)
    before = device.temp_c
    reading = device.advance(dt_s, util)
    assert CONFIG.idle_w - 1e-9 <= reading.power_w <= cap_w + 1e-9
    assert before - 1e-9 <= reading.temp_c <= steady_c(CONFIG, cap_w) + 1e-9
    assert 0.0 <= reading.util <= 1.0


# the governor ----------------------------------------------------------------------------------


def rack(
    live: int, load: float | None = None, *, slots: int = 8, budget_w: float = 0.0
) -> RackPower:
    """A rack whose first `live` slots share the work of `slots` evenly."""
    share = slots / live if load is None else load
    return RackPower(
        loads=(share,) * live + (0.0,) * (slots - live),
        live=tuple(range(live)),
        limits=LIMITS,
        budget_w=budget_w,
    )


def test_a_healthy_rack_needs_no_boost() -> None:
    plan = plan_caps(rack(8))
    assert plan.caps_w == (1000.0,) * 8
    assert (plan.pace, plan.limited_by) == (1.0, "")


def test_eight_to_seven_needs_a_tenth_more_than_the_normal_budget() -> None:
    within = plan_caps(rack(7))
    assert within.caps_w == (1142.0,) * 7 + (0.0,)
    assert within.limited_by == "budget"
    assert within.pace == pytest.approx(0.957, abs=1e-3)
    enough = plan_caps(rack(7, budget_w=8900.0))
    assert enough.limited_by == ""
    assert enough.pace == pytest.approx(1.0, abs=1e-3)
    assert enough.sum_w / 8000.0 == pytest.approx(1.10, abs=5e-3)


def test_nvl72_with_71_slots_stays_near_its_budget() -> None:
    plan = plan_caps(rack(71, slots=72, budget_w=73_000.0))
    assert plan.caps_w[0] == pytest.approx(1019.0, abs=1.0)
    assert plan.limited_by == ""


def test_eight_to_six_is_limited_by_the_device() -> None:
    plan = plan_caps(rack(6, budget_w=20_000.0))
    assert plan.caps_w == (1300.0,) * 6 + (0.0, 0.0)
    assert plan.limited_by == "device"
    assert plan.pace == pytest.approx(1.1557 * 6 / 8, abs=1e-3)


def test_watts_go_to_the_busiest_slots() -> None:
    uneven = RackPower(
        loads=(1.115, 1.173, 1.173, 1.01, 1.01, 1.01, 1.01, 0.0),
        live=tuple(range(7)),
        limits=LIMITS,
    )
    plan = plan_caps(uneven)
    assert plan.caps_w[1] == 1300.0
    assert plan.caps_w[3] == 1000.0
    assert plan.pace == pytest.approx(1.1557 / 1.173, abs=1e-3)
    assert plan.limited_by == "device"
    assert plan.sum_w <= 8000.0


def test_a_budget_below_the_normal_caps_lowers_all_and_says_so() -> None:
    plan = plan_caps(rack(8, budget_w=7000.0))
    assert plan.caps_w == (875.0,) * 8
    assert plan.limited_by == "budget"
    with pytest.raises(PlanError, match="raise power_budget_w to 1600 W"):
        plan_caps(rack(8, budget_w=1000.0))


def test_a_rack_without_work_or_life() -> None:
    assert plan_caps(rack(8, 0.0)).caps_w == (1000.0,) * 8
    dead = RackPower(loads=(0.0,) * 8, live=(), limits=LIMITS)
    assert plan_caps(dead).caps_w == (0.0,) * 8


@given(
    loads=st.lists(st.floats(min_value=0.1, max_value=3.0), min_size=1, max_size=12),
    dead=st.sets(st.integers(min_value=0, max_value=11)),
    budget_w=st.floats(min_value=12 * 200.0, max_value=20_000.0),
    target=st.floats(min_value=0.1, max_value=1.5),
)
def test_never_above_budget_or_limits(
    loads: list[float], dead: set[int], budget_w: float, target: float
) -> None:
    live = tuple(slot for slot in range(len(loads)) if slot not in dead)
    work = tuple(load if slot in live else 0.0 for slot, load in enumerate(loads))
    situation = RackPower(loads=work, live=live, limits=LIMITS, budget_w=budget_w)
    plan = plan_caps(situation, target)
    assert plan.sum_w <= budget_w
    for slot, cap_w in enumerate(plan.caps_w):
        assert (LIMITS.min_w <= cap_w <= LIMITS.max_w) if slot in live else cap_w == 0.0
    if live and plan.limited_by == "":
        assert plan.pace >= target - 1e-6
    paces = [perf(plan.caps_w[slot] / LIMITS.normal_w) / work[slot] for slot in live]
    if live:
        assert plan.pace == min(paces)
        boosted = [slot for slot in live if plan.caps_w[slot] > LIMITS.normal_w]
        # Least boost: a watt less on any boosted slot would fall short of the pace it serves.
        for slot in boosted:
            less = perf((plan.caps_w[slot] - 1.001) / LIMITS.normal_w) / work[slot]
            assert less <= max(plan.pace, min(target, PEAK_PERF / work[slot])) + 1e-9
