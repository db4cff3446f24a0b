"""The rack's ledger: whatever happens, no sum above the budget and no cap beyond its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.power.ledger import HeatRule, RackLedger
from runtime.power.port import CapError, PowerLimits, Reading
from runtime.power.rack_caps import CapBatch, RackCaps

LIMITS = PowerLimits(min_w=200.0, normal_w=1000.0, max_w=1300.0)


class Device:
    """A device that keeps what it is told, refuses when told to, and lets every set be watched."""

    name, obstacle = "test", ""

    def __init__(self, watch) -> None:  # type: ignore[no-untyped-def]
        self.cap_w = 1000.0
        self.temp_c = 50.0
        self.refuses = False
        self._watch = watch

    def limits(self) -> PowerLimits:
        return LIMITS

    def read(self) -> Reading:
        return Reading(
            power_w=self.cap_w, temp_c=self.temp_c, clock_mhz=1.0, util=1.0, cap_w=self.cap_w
        )

    def set_cap(self, cap_w: float) -> None:
        if self.refuses:
            raise CapError("refused")
        raised = cap_w > self.cap_w
        self.cap_w = cap_w
        self._watch(raised)

    def close(self) -> None: ...


class Rack:
    """Devices, ledger and what carries it out; checks every promise after every single set."""

    def __init__(self, num: int = 8, budget_w: float = 0.0, heat: HeatRule | None = None) -> None:
        self.devices = [Device(self.watch) for _ in range(num)]
        self.ledger = RackLedger(
            LIMITS, [1000.0] * num, budget_w=budget_w, ramp_w_per_s=250.0, heat=heat
        )
        self.caps = RackCaps("r", self.devices, self.ledger)
        self.at = 0.0
        self.settle()

    def watch(self, raised: bool) -> None:
        on = [d for d, power in zip(self.devices, self.ledger.powered, strict=True) if power]
        if raised:
            assert sum(d.cap_w for d in on) <= self.ledger.budget_w + 1e-6
        assert all(LIMITS.min_w <= d.cap_w <= LIMITS.max_w for d in self.devices)

    def settle(self, dt_s: float = 1.0, cause: str = "test") -> CapBatch | None:
        self.at += dt_s
        batch = self.caps.settle(self.at, dt_s, cause, "test")
        for device, cap_w in zip(self.devices, self.ledger.caps_w, strict=True):
            assert device.cap_w == cap_w
        if self.ledger.budget_w >= self.ledger.least_w and not any(d.refuses for d in self.devices):
            assert self.sum_w <= self.ledger.budget_w + 1e-6
        return batch

    @property
    def sum_w(self) -> float:
        return sum(d.cap_w for d, on in zip(self.devices, self.ledger.powered, strict=True) if on)

    @property
    def caps_w(self) -> list[float]:
        return [device.cap_w for device in self.devices]


def test_a_boost_rises_by_the_ramp_and_only_with_free_watts() -> None:
    rack = Rack(budget_w=8900.0)
    rack.caps.dismiss(7)
    rack.ledger.want(dict.fromkeys(range(7), 1270.0))
    rack.settle(0.5)
    assert rack.caps_w[:7] == [1125.0] * 7
    rack.settle(1.0)
    assert rack.caps_w[:7] == [1270.0] * 7
    assert rack.sum_w == 8890.0
    assert rack.ledger.limited_by() == ""


def test_a_budget_cut_takes_boosts_first_and_at_once() -> None:
    rack = Rack(budget_w=8900.0)
    rack.ledger.want({0: 1300.0, 1: 1200.0})
    rack.settle(5.0)
    rack.ledger.set_budget(8250.0)
    batch = rack.settle(0.0, "cut")
    assert batch is not None
    assert (batch.slots, batch.limited_by) == ((0, 1), "the rack's power budget")
    assert rack.caps_w[:3] == [1150.0, 1100.0, 1000.0]
    rack.ledger.set_budget(6000.0)
    rack.settle(0.0)
    assert rack.sum_w <= 6000.0
    assert min(rack.caps_w) >= 749.0
    rack.ledger.set_budget(8900.0)
    rack.settle(5.0)
    assert rack.caps_w[:3] == [1300.0, 1200.0, 1000.0]


def test_a_returning_gpu_gets_room_before_it_counts() -> None:
    rack = Rack()
    rack.caps.dismiss(7)
    rack.ledger.want(dict.fromkeys(range(7), 1142.0))
    rack.settle(5.0)
    assert rack.sum_w == 7994.0
    rack.caps.admit(7)
    batch = rack.settle(0.0, "returns")
    assert batch is not None
    assert batch.slots[-1] == 7, "the others are lowered first"
    assert rack.devices[7].cap_w == 200.0
    assert rack.sum_w <= 8000.0
    rack.ledger.want(dict.fromkeys(range(8), 1000.0))
    rack.settle(0.0)
    assert rack.caps_w == [1000.0] * 8, "up to the normal cap there is no ramp"


def test_what_a_device_keeps_the_others_make_room_for() -> None:
    rack = Rack(budget_w=8900.0)
    rack.ledger.want({0: 1300.0})
    rack.settle(5.0)
    rack.devices[0].refuses = True
    rack.ledger.set_budget(7000.0)
    batch = rack.settle(0.0)
    assert batch is not None
    assert batch.refused == {0: "refused"}
    assert rack.devices[0].cap_w == 1300.0
    assert rack.sum_w <= 7000.0
    rack.devices[0].refuses = False
    rack.caps.retry()
    rack.settle(5.0)
    assert rack.sum_w <= 7000.0
    assert max(rack.caps_w) - min(rack.caps_w) <= 1.0


def test_a_hot_gpu_gives_its_boost_back_at_once_and_more_if_it_stays_hot() -> None:
    rack = Rack(budget_w=9000.0, heat=HeatRule(hot_c=85.0))
    rack.ledger.want({0: 1300.0})
    rack.settle(5.0)
    temps = [86.0] + [60.0] * 7
    assert rack.ledger.observe(temps, [False] * 8, 1.0)
    batch = rack.settle(1.0)
    assert batch is not None
    assert (rack.caps_w[0], batch.limited_by) == (1000.0, "a hot or throttled GPU")
    for _ in range(5):
        rack.ledger.observe(temps, [False] * 8, 1.0)
        rack.settle(1.0)
    assert rack.caps_w[0] == 950.0
    for _ in range(29):
        rack.ledger.observe([70.0] * 8, [False] * 8, 1.0)
        rack.settle(1.0)
    assert rack.caps_w[0] == 950.0, "no return before it has stayed cool"
    for _ in range(60):
        rack.ledger.observe([70.0] * 8, [False] * 8, 1.0)
        rack.settle(1.0)
    assert rack.caps_w[0] == 1300.0
    assert rack.ledger.limited_by() == ""


def test_throttling_counts_where_no_temperature_is_known() -> None:
    rack = Rack(budget_w=9000.0)
    rack.ledger.want({0: 1300.0})
    rack.settle(5.0)
    assert rack.ledger.observe([math.nan] * 8, [True] + [False] * 7, 1.0)
    rack.settle(0.0)
    assert rack.caps_w[0] == 1000.0


def test_a_cap_that_changed_without_us_is_seen_and_set_again() -> None:
    rack = Rack(budget_w=9000.0)
    rack.ledger.want({0: 1300.0})
    rack.settle(5.0)
    rack.devices[0].cap_w = 1000.0
    rack.devices[1].cap_w = 1300.0
    rack.caps.read()
    batch = rack.caps.settle(9.0, 5.0)
    assert batch is not None
    assert "without us" in batch.cause
    assert rack.caps_w[:2] == [1300.0, 1000.0]


def test_nothing_to_do_makes_no_record() -> None:
    assert Rack().settle() is None


EVENTS = st.one_of(
    st.tuples(st.just("fail"), st.integers(0, 7), st.just(0.0)),
    st.tuples(st.just("repair"), st.integers(0, 7), st.just(0.0)),
    st.tuples(st.just("budget"), st.just(0), st.floats(100.0, 12_000.0)),
    st.tuples(st.just("want"), st.integers(0, 7), st.floats(0.0, 2000.0)),
    st.tuples(st.just("want_all"), st.just(0), st.floats(0.0, 2000.0)),
    st.tuples(st.just("heat"), st.integers(0, 7), st.floats(20.0, 120.0)),
    st.tuples(st.just("refuse"), st.integers(0, 7), st.just(0.0)),
    st.tuples(st.just("obey"), st.integers(0, 7), st.just(0.0)),
    st.tuples(st.just("tick"), st.just(0), st.floats(0.0, 5.0)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.floats(1600.0, 12_000.0))
def test_no_sequence_of_events_breaks_a_promise(
    events: list[tuple[str, int, float]], budget_w: float
) -> None:
    rack = Rack(budget_w=budget_w, heat=HeatRule(hot_c=85.0))
    temps = np.full(8, 50.0)
    for kind, slot, value in events:
        dt_s = 0.0
        if kind == "fail":
            rack.caps.dismiss(slot)
        elif kind == "repair":
            rack.caps.admit(slot)
        elif kind == "budget":
            rack.ledger.set_budget(value)
        elif kind == "want":
            rack.ledger.want({slot: value})
        elif kind == "want_all":
            rack.ledger.want(dict.fromkeys(range(8), value))
        elif kind == "heat":
            temps[slot] = value
        elif kind in ("refuse", "obey"):
            rack.devices[slot].refuses = kind == "refuse"
            if kind == "obey":
                rack.ledger.retry()  # Nobody knows that a device obeys again until it is asked.
        else:
            dt_s = value
            rack.ledger.retry()
            rack.ledger.observe(temps, [False] * 8, value)
        before = rack.caps_w
        rack.settle(dt_s)
        for was, now in zip(before, rack.caps_w, strict=True):
            rise = now - max(was, LIMITS.normal_w)
            assert rise <= 250.0 * dt_s + 1e-6, "a boost rises by the ramp"


@pytest.mark.parametrize("budget_w", [1600.0, 1700.0, 4321.0, 8000.0, 9999.0])
def test_a_budget_is_used_up(budget_w: float) -> None:
    rack = Rack(budget_w=budget_w)
    rack.ledger.want(dict.fromkeys(range(8), 1300.0))
    rack.settle(5.0)
    assert budget_w - 8.0 < rack.sum_w <= budget_w
