"""The cost model: shapes against the healthy run, host floors, calibration."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from runtime.config import ClusterConfig, Config, EmulatedConfig, RackConfig, TrainConfig
from runtime.layout.fractional import layout_for
from runtime.layout.takeover import home_holders, takeover
from runtime.plan.cost import Calibration, CostModel, ReplicaLoad, StepObserved, calibrate

CONFIG = Config()
CAPS_W = (1000.0,) * 8
HOME = home_holders(CONFIG.model, 8)


def healthy(num_samples: int = 8, **changes: object) -> ReplicaLoad:
    load = ReplicaLoad(holders=HOME, live=tuple(range(8)), caps_w=CAPS_W, num_samples=num_samples)
    return msgspec.structs.replace(load, **changes)


def seven(num_samples: int = 7) -> ReplicaLoad:
    live = tuple(range(7))
    holders = takeover(CONFIG.model, HOME, HOME, live)
    return healthy(num_samples, holders=holders, live=live)


def test_the_healthy_run_takes_the_configured_step() -> None:
    model = CostModel(config=CONFIG)
    step = model.predict([healthy(), healthy()])
    assert step.step_s == model.ideal_step_s == CONFIG.emulated.step_s
    assert step.goodput == 1.0
    assert step.tokens_per_s == 16 * 64


@pytest.mark.parametrize(
    ("loads", "step_s"),
    [
        ([healthy(16), healthy(0)], 2.0),
        ([healthy(9), seven(7)], 1.125),
        ([healthy(8), healthy(8, slowness=(1.0,) * 7 + (2.0,))], 2.0 * 0.885),
        ([healthy(8), healthy(8, caps_w=(500.0,) * 8)], 0.5**-0.765),
    ],
)
def test_shapes(loads: list[ReplicaLoad], step_s: float) -> None:
    step = CostModel(config=CONFIG).predict(loads)
    assert step.step_s == pytest.approx(step_s, abs=1e-3)
    assert step.goodput == pytest.approx(1.0 / step_s, abs=1e-3)


def test_nothing_trains() -> None:
    step = CostModel(config=CONFIG).predict([healthy(0), healthy(0)])
    assert (step.step_s, step.tokens_per_s, step.goodput) == (0.0, 0.0, 0.0)
    assert CostModel(config=CONFIG).speed(healthy(live=())) == 0.0


def test_the_batch_follows_speed() -> None:
    model = CostModel(config=CONFIG)
    shared = model.shared_out([healthy(0), seven(0)], [True, True])
    assert [load.num_samples for load in shared] == [9, 7]
    shared = model.shared_out([healthy(0), seven(0)], [True, False])
    assert [load.num_samples for load in shared] == [16, 0]


def test_a_slow_host_is_a_floor_under_the_emulated_share() -> None:
    known = Calibration(host_s_per_sample=0.09, overhead_s=0.05)
    model = CostModel(config=CONFIG, calibration=known)
    assert model.ideal_step_s == pytest.approx(16 * 0.09 + 0.05)
    assert model.predict([healthy(9), seven(7)]).goodput == 1.0
    alone = model.predict([healthy(16), healthy(0)])
    assert alone.step_s == pytest.approx(2.05)


def test_two_hosts_carry_their_own_samples() -> None:
    known = Calibration(host_s_per_sample=0.15)
    model = CostModel(config=CONFIG, calibration=known)
    step = model.predict([healthy(8), healthy(8, host="b")])
    assert step.replica_step_s == pytest.approx((1.2, 1.2))


def test_calibrate_takes_medians() -> None:
    model = CostModel(config=CONFIG)
    loads = [healthy(), healthy()]
    steps = [
        StepObserved(
            step_s=1.1 + extra,
            samples=(8, 8),
            replica_step_s=(1.0, 1.0),
            compute_s=(0.32, 0.30),
        )
        for extra in (0.0, 0.0, 5.0)
    ]
    known = calibrate(model, loads, steps)
    assert known.overhead_s == pytest.approx(0.1)
    assert known.host_s_per_sample == pytest.approx(0.02)
    again = CostModel(config=CONFIG, calibration=known)
    assert again.predict(loads).step_s == pytest.approx(1.1)
    assert calibrate(again, loads, []) == known


def test_as_fast_as_the_host() -> None:
    config = msgspec.structs.replace(CONFIG, emulated=EmulatedConfig(step_s=0.0))
    unknown = CostModel(config=config)
    assert unknown.predict([healthy(16), healthy(0)]).goodput == 0.5
    measured = StepObserved(
        step_s=0.5, samples=(8, 8), replica_step_s=(0.4, 0.4), compute_s=(0.4, 0.4)
    )
    known = calibrate(unknown, [healthy(), healthy()], [measured])
    model = CostModel(config=config, calibration=known)
    assert model.ideal_step_s == pytest.approx(0.5)
    assert model.predict(model.shared_out([healthy(), seven()], [True, True])).step_s == (
        pytest.approx(0.5)
    )


def test_real_gpus_scale_the_measured_step() -> None:
    cluster = msgspec.structs.replace(CONFIG.cluster, device="cuda")
    model = CostModel(config=msgspec.structs.replace(CONFIG, cluster=cluster))
    measured = StepObserved(step_s=4.2, samples=(9, 7), replica_step_s=(4.0, 3.7))
    known = calibrate(model, [healthy(9), seven(7)], [measured])
    again = CostModel(config=model.config, calibration=known)
    assert again.predict([healthy(9), seven(7)]).step_s == pytest.approx(4.2)
    assert again.ideal_step_s == pytest.approx(4.0 * 8 / 9 + 0.2)


def test_an_uneven_batch_is_no_loss_of_the_healthy_run() -> None:
    racks = tuple(RackConfig(name=f"rack-{index}") for index in range(3))
    config = Config(cluster=ClusterConfig(racks=racks), train=TrainConfig(global_batch=16))
    model = CostModel(config=config)
    assert [load.num_samples for load in model.healthy_loads()] == [6, 5, 5]
    assert model.ideal_step_s == pytest.approx(config.emulated.step_s)


def test_units_shared_by_sample_make_the_predicted_step_shorter() -> None:
    config = Config(train=TrainConfig(micro_batch=16, global_batch=32))
    home = home_holders(config.model, 8)
    live = tuple(range(7))

    def sample_s(fractional: Literal["auto", "off"]) -> float:
        train = msgspec.structs.replace(config.train, fractional=fractional)
        holders = layout_for(config.model, train, 2, home, home, live)
        load = ReplicaLoad(holders=holders, live=live, caps_w=(1000.0,) * 8)
        return CostModel(config=config).sample_s(load)

    even = CostModel(config=config).sample_s(
        ReplicaLoad(holders=home, live=tuple(range(8)), caps_w=(1000.0,) * 8)
    )
    # 3 heads instead of 2 and 7 blocks instead of 6; shared, little more than 8/7 is left of it.
    assert sample_s("auto") < 0.93 * sample_s("off")
    assert sample_s("auto") < 1.09 * even
