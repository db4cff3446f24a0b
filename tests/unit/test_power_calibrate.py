"""Measuring a curve, planning by it, and when the batch is split anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import Config, EmulatedConfig, RackConfig, load_config, parse_config
from runtime.control.rebalance import STEPS, Rebalance
from runtime.errors import ConfigError, PlanError
from runtime.plan.lookahead import failures_to_spare
from runtime.power.calibrate import Point, curve_file, curve_points, sweep, sweep_caps
from runtime.power.curve import Curve
from runtime.power.emulated import EmulatedDevice
from runtime.power.measured import emulated_bench
from runtime.power.port import CapError, PowerLimits

TRUE = ((0.4, 0.45), (1.0, 1.0), (1.3, 1.2))
LIMITS = PowerLimits(min_w=200.0, normal_w=1000.0, max_w=1300.0)


def test_a_sweep_finds_the_devices_own_curve_and_the_config_takes_it(tmp_path: Path) -> None:
    bench = emulated_bench(Config(emulated=EmulatedConfig(curve=TRUE)))
    points = sweep(bench.backend, sweep_caps(bench.backend.limits(), 9), bench.pace)
    curve = curve_points(points, 1000.0)
    for ratio, pace in curve:
        assert pace == pytest.approx(Curve(TRUE).perf(ratio), abs=1e-5)
    assert bench.backend.read().cap_w == 1000.0, "its cap is put back"
    text = curve_file(curve, device="emulated device", normal_w=1000.0, emulated=True)
    (tmp_path / "curve.toml").write_text(text)
    (tmp_path / "run.toml").write_text('[power]\ncurve_file = "curve.toml"\n')
    config = load_config(tmp_path / "run.toml")
    assert config.power.curve == curve
    assert config.power.curve_file == "", "the run's record needs no other file"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "curve_file"),
        ("curve = [[1.0, 1.0]]", "two points"),
        ("curve = [[1.0, 1.0], [0.9, 1.2]]", "must rise"),
        ("curve = [[1.0, 1.0], [1.1, nan]]", "finite"),
        ("curve = 3", "calibrate"),
    ],
)
def test_a_spoilt_curve_file_is_refused_before_anything_starts(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "c.toml").write_text(text)
    (tmp_path / "run.toml").write_text('[power]\ncurve_file = "c.toml"\n')
    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path / "run.toml")


def test_a_curve_file_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[power]\ncurve_file = "gone.toml"\n')
    with pytest.raises(ConfigError, match=r"gone\.toml"):
        load_config(tmp_path / "run.toml")


@pytest.mark.parametrize(
    "power",
    [
        {"ramp_w_per_s": 0.0}, {"normal_cap_w": -1.0}, {"backend": "nvml"}, {"watts": 3},
        {"curve": [[1.0, 1.0], [2.0, 2.0]], "curve_file": "x"},
    ],
)  # fmt: skip
def test_impossible_power_sections_are_refused(power: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        parse_config({"power": power}, origin="test")


def test_the_cap_is_put_back_when_the_work_fails() -> None:
    device = EmulatedDevice(EmulatedConfig())

    def fails() -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        sweep(device, (500.0, 1300.0), fails)
    assert device.cap_w == 1000.0


def test_no_sweep_without_permission() -> None:
    device = EmulatedDevice(EmulatedConfig())
    device.obstacle = "ask an administrator"  # type: ignore[misc]
    with pytest.raises(CapError, match="ask an administrator"):
        sweep(device, (500.0,), lambda: 1.0)


def test_noise_makes_no_curve_that_falls() -> None:
    points = [
        Point(cap_w=cap_w, pace=pace, drawn_w=cap_w, temp_c=60.0)
        for cap_w, pace in ((500.0, 6.0), (1000.0, 10.0), (1100.0, 9.9), (1200.0, 11.0))
    ]
    assert curve_points(points, 1000.0) == ((0.5, 0.6), (1.0, 1.0), (1.1, 1.0), (1.2, 1.1))
    with pytest.raises(PlanError, match="normal cap"):
        curve_points(points, 900.0)


@given(st.integers(2, 40), st.floats(0.0, 1200.0))
def test_a_sweep_stays_within_limits_and_has_the_normal_cap(steps: int, low_w: float) -> None:
    caps = sweep_caps(LIMITS, steps, low_w)
    assert caps == tuple(sorted(set(caps)))
    assert LIMITS.normal_w in caps
    assert LIMITS.min_w <= caps[0] <= caps[-1] == LIMITS.max_w


@given(st.floats(0.01, 2.0))
def test_a_measured_curve_is_inverted(ratio: float) -> None:
    curve = Curve(TRUE)
    pace = curve.perf(ratio)
    assert curve.perf(curve.power_for(pace)) == pytest.approx(pace, abs=1e-9)


# headroom --------------------------------------------------------------------------------------


def test_headroom_follows_budget_and_losses() -> None:
    config = Config()
    whole = tuple(range(8))
    tight = RackConfig(name="r", power_budget_w=7200.0)
    roomy = RackConfig(name="r", power_budget_w=9500.0)
    assert failures_to_spare(config, tight, whole) == 0
    assert failures_to_spare(config, roomy, whole) == 1
    assert failures_to_spare(config, roomy, whole[:7]) == 0
    assert failures_to_spare(config, roomy, ()) == 0


# the split -------------------------------------------------------------------------------------


def fed(
    split: Rebalance, samples: dict[int, int], per_sample: dict[int, float], now: float
) -> list[object]:
    shares = {replica: count * per_sample[replica] for replica, count in samples.items()}
    return [split.observe(samples, shares, restrained=True, now=now) for _ in range(STEPS + 1)]


def test_samples_move_to_whom_power_leaves_the_pace() -> None:
    split = Rebalance()
    found = fed(split, {0: 8, 1: 8}, {0: 0.1, 1: 0.14}, 0.0)
    assert found[:-1] == [None] * STEPS
    assert found[-1] is not None
    assert found[-1].samples == (9, 7)  # type: ignore[attr-defined]


def test_a_small_gain_or_no_restraint_changes_nothing() -> None:
    assert fed(Rebalance(), {0: 8, 1: 8}, {0: 0.1, 1: 0.101}, 0.0)[-1] is None
    split = Rebalance()
    for _ in range(10):
        assert split.observe({0: 8, 1: 8}, {0: 0.8, 1: 2.0}, restrained=False, now=0.0) is None


def test_it_waits_longer_after_each_change() -> None:
    split = Rebalance()
    split.applied(0.0, restrained=True)
    split.generation_published()
    assert fed(split, {0: 8, 1: 8}, {0: 0.1, 1: 0.2}, 4.0)[-1] is None
    assert fed(split, {0: 8, 1: 8}, {0: 0.1, 1: 0.2}, 6.0)[-1] is not None
