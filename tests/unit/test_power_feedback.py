"""The governor's feedback in a closed loop, over devices that are not as the model has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.power.curve import Curve, perf
from runtime.power.feedback import Governor, TrimRule
from runtime.power.governor import RackPower, plan_caps
from runtime.power.ledger import RackLedger
from runtime.power.port import PowerLimits

LIMITS = PowerLimits(min_w=200.0, normal_w=1000.0, max_w=1600.0)
LOAD = 8 / 7


class Loop:
    """One rack of 8 with 7 live slots, stepped until told otherwise.

    paces: per slot, how fast the device really is at a cap. noise: of every share.
    """

    def __init__(
        self,
        paces: Sequence[Curve],
        *,
        budget_w: float = 20_000.0,
        noise: float = 0.0,
        loads: Sequence[float] = (LOAD,) * 7 + (0.0,),
    ) -> None:
        self.paces = paces
        self.loads = loads
        plan = plan_caps(
            RackPower(loads=tuple(loads), live=tuple(range(7)), limits=LIMITS, budget_w=budget_w)
        )
        self.ledger = RackLedger(LIMITS, [1000.0] * 8, budget_w=budget_w, ramp_w_per_s=250.0)
        self.ledger.turn_off(7)
        self.governor = Governor(LIMITS, plan.caps_w, floor_w=1000.0)
        self.random = np.random.default_rng(0)
        self.noise = noise
        self.trims = 0
        self.ledger.want(dict(enumerate(plan.caps_w)))
        self.settle()

    def settle(self, *, anew: bool = True) -> None:
        before = self.ledger.caps_w.copy()
        for slot, cap_w in (*self.ledger.lowers(), *self.ledger.raises(1.0)):
            self.ledger.took(slot, cap_w)
        assert self.ledger.sum_w <= self.ledger.budget_w
        if (before != self.ledger.caps_w).any():
            self.governor.granted(self.ledger.caps_w, anew=anew)

    def shares(self) -> list[float]:
        return [
            load / curve.perf(cap_w / 1000.0) * (1.0 + self.noise * self.random.standard_normal())
            if load
            else 0.0
            for load, curve, cap_w in zip(self.loads, self.paces, self.ledger.caps_w, strict=True)
        ]

    def steps(self, count: int, reference_s: float = 1.0) -> float:
        """Longest share of a live slot after `count` steps, without the noise."""
        for _ in range(count):
            wanted = self.governor.observe(self.shares(), reference_s)
            if wanted is not None:
                self.trims += 1
                self.ledger.want(dict(enumerate(wanted)))
            self.settle(anew=False)
        noise, self.noise = self.noise, 0.0
        longest = max(self.shares())
        self.noise = noise
        return longest


def bent(factor: float) -> Curve:
    """Devices that bring `factor` of the pace the model promises, above the normal cap."""
    return Curve(
        [(1.0, 1.0)]
        + [
            (ratio, 1.0 + (perf(min(ratio, 1.4)) + 0.3 * max(0.0, ratio - 1.4) - 1.0) * factor)
            for ratio in (1.1, 1.2, 1.3, 1.4, 1.5, 1.6)
        ]
    )


def test_a_right_model_needs_no_trim() -> None:
    loop = Loop([bent(1.0)] * 8)
    assert loop.steps(40) == pytest.approx(1.0, abs=0.015)
    assert loop.trims == 0


TENTH_TOO_SLOW = Curve([(1.0, 1.0), (1.26, 1.03), (1.5, 1.13), (1.6, 1.16)])


@pytest.mark.parametrize("curve", [TENTH_TOO_SLOW, bent(0.75), bent(1.4), bent(1.6)])
def test_a_wrong_curve_is_corrected_with_the_fewest_watts(curve: Curve) -> None:
    loop = Loop([curve] * 8)
    longest = loop.steps(120)
    assert 1.0 - 0.031 <= longest <= 1.0 + 0.016
    assert loop.ledger.caps_w[0] != pytest.approx(1260.0, abs=10.0)
    settled = loop.trims
    loop.steps(100)
    assert loop.trims == settled, "at rest once the pace is kept"


def test_gpus_that_differ_get_caps_that_differ() -> None:
    loop = Loop([bent(factor) for factor in (0.85, 0.9, 1.0, 1.0, 1.1, 1.2, 1.3, 1.0)])
    assert loop.steps(200) <= 1.016
    caps = loop.ledger.caps_w
    assert caps[0] > caps[2] > caps[6]


def test_noise_does_not_make_it_wander() -> None:
    loop = Loop([bent(0.9)] * 8, noise=0.01)
    assert loop.steps(300) == pytest.approx(1.0, abs=0.04)
    caps = loop.ledger.caps_w.copy()
    loop.steps(100)
    assert np.abs(loop.ledger.caps_w - caps)[:7].max() < 60.0


def test_what_the_budget_withholds_is_reported_as_short_and_not_asked_for_ever() -> None:
    loop = Loop([bent(0.9)] * 8, budget_w=8000.0)
    loop.steps(60)
    assert loop.governor.short
    assert loop.governor.lag > 0.03
    settled = loop.trims
    loop.steps(100)
    assert loop.trims - settled <= 1
    assert 7900.0 < loop.ledger.sum_w <= 8000.0
    loop.ledger.set_budget(20_000.0)
    loop.settle(anew=True)
    assert loop.steps(120) <= 1.016
    assert not loop.governor.short


def test_watts_that_do_not_help_are_given_back() -> None:
    stuck = Curve([(1.0, 0.9), (1.6, 0.9)])
    loop = Loop([stuck] * 8)
    planned = loop.ledger.caps_w.copy()
    loop.steps(100)
    assert np.abs(loop.ledger.caps_w - planned)[:7].max() <= 25.0


def test_a_slower_reference_takes_watts_back() -> None:
    loop = Loop([bent(1.0)] * 8)
    loop.steps(20)
    before = loop.ledger.sum_w
    assert loop.steps(100, reference_s=1.1) <= 1.1 * 1.016
    assert loop.ledger.sum_w < before - 500.0


def test_a_slot_without_boost_that_is_late_gets_one() -> None:
    loads = (1.0, *(LOAD,) * 6, 0.0)
    slow = Curve([(0.9, 0.85), (1.0, 0.93), (1.6, 1.3)])
    loop = Loop([slow] + [bent(1.0)] * 7, loads=loads)
    assert loop.ledger.caps_w[0] == 1000.0
    assert loop.steps(100) <= 1.016
    assert loop.ledger.caps_w[0] > 1000.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.6, 1.8), min_size=8, max_size=8),
    st.floats(7200.0, 12_000.0),
    st.lists(st.floats(0.5, 2.0), max_size=12),
)
def test_wishes_stay_within_limits_whatever_is_measured(
    factors: list[float], budget_w: float, references: list[float]
) -> None:
    loop = Loop([bent(factor) for factor in factors], budget_w=budget_w, noise=0.05)
    for reference_s in references:
        loop.steps(8, reference_s)
        wanted = loop.governor.wanted_w
        assert wanted[7] == 0.0
        assert (wanted[:7] >= 200.0).all()
        assert (wanted[:7] <= LIMITS.max_w).all()


def test_a_trim_is_bounded_and_waits_for_its_steps() -> None:
    rule = TrimRule(steps=3, settle=1, largest=0.08)
    governor = Governor(LIMITS, [1200.0, 1200.0], floor_w=1000.0, rule=rule)
    assert [governor.observe([2.0, 1.0], 1.0) for _ in range(3)] == [None] * 3
    wanted = governor.observe([2.0, 1.0], 1.0)
    assert wanted is not None
    assert wanted.tolist() == [1296.0, 1200.0]
    assert governor.observe([2.0, 1.0], 0.0) is None, "no reference, no judgement"
