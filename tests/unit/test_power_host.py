"""Power of a host: caps are kept, restored after a crash and at the end, and watched over."""

from __future__ import annotations

import itertools
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.config import ClusterConfig, Config, EmulatedConfig, RackConfig
from runtime.control import messages as m
from runtime.control.telemetry import HostTelemetry
from runtime.power.backends.dry_run import DryRun
from runtime.power.backends.opening import open_backends
from runtime.power.config import PowerConfig
from runtime.power.emulated import EmulatedDevice
from runtime.power.host import UNWATCHED_S, HostPower
from runtime.power.port import Reading
from runtime.power.prior import PriorCaps, PriorFile
from tests.support.fake_nvml_power import FakeGpu, FakeNvml

RACK = RackConfig(name="r", gpus=4, power_budget_w=2800.0)
GPUS = [f"r/{slot}" for slot in range(4)]
CUDA = Config(
    cluster=ClusterConfig(racks=(RACK,), device="cuda"), power=PowerConfig(normal_cap_w=600.0)
)


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def nvml() -> FakeNvml:
    """Four GPUs at limits that an administrator chose, not at their defaults."""
    return FakeNvml([FakeGpu(f"GPU-{slot}", limit_mw=650_000) for slot in range(4)])


def start(nvml: FakeNvml, home: Path | None, now: float = 0.0, config: Config = CUDA) -> HostPower:
    racks = config.cluster.racks
    return HostPower(config, racks, open_backends(config, GPUS, {}, nvml), now=now, home=home)


def limits_w(nvml: FakeNvml) -> list[float]:
    return [gpu.limit_mw / 1000 for gpu in nvml.gpus]


def file_of(home: Path) -> Path:
    return home / "power" / "caps-before-localhost.json"


def test_the_normal_cap_is_set_and_what_was_before_comes_back(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    power = start(nvml, tmp_path)
    assert limits_w(nvml) == [600.0] * 4
    batch = power.take_batches()[0]
    assert (batch.by, batch.from_w, batch.to_w) == ("agent", (650.0,) * 4, (600.0,) * 4)
    power.want(dict.fromkeys(GPUS, 680.0), 1.0, "a boost", "governor")
    assert limits_w(nvml) == [680.0] * 4
    assert file_of(tmp_path).exists()
    power.close(2.0)
    assert limits_w(nvml) == [650.0] * 4, "what was found, not the default of 700 W"
    assert not file_of(tmp_path).exists()
    assert nvml.num_open == 0


def test_nothing_is_written_before_something_is_set(nvml: FakeNvml, tmp_path: Path) -> None:
    found = Config(cluster=ClusterConfig(racks=(RACK,), device="cuda"))
    power = start(nvml, tmp_path, config=found)
    assert power.offer().normal_w == 650.0
    assert not file_of(tmp_path).exists()
    assert power.take_batches() == []
    power.close(1.0)
    assert limits_w(nvml) == [650.0] * 4


def test_a_killed_agent_leaves_safe_caps_and_the_next_one_restores(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    first = start(nvml, tmp_path)
    first.want({"r/0": 700.0, "r/1": 700.0, "r/2": 700.0, "r/3": 0.0}, 1.0, "boost", "governor")
    assert sum(limits_w(nvml)) <= RACK.power_budget_w
    assert limits_w(nvml) == [700.0, 700.0, 700.0, 200.0]
    # Killed here: no close. Somebody then changes nothing; the next agent starts.
    second = start(nvml, tmp_path, now=5.0)
    assert limits_w(nvml) == [600.0] * 4, "restored, then the config's normal cap"
    assert PriorFile(file_of(tmp_path)).read() is not None
    second.close(6.0)
    assert limits_w(nvml) == [650.0] * 4, "the very first value, not what the crash left"


def boosted(nvml: FakeNvml, home: Path) -> HostTelemetry:
    """All of an agent's devices, boosted."""
    clock = itertools.count(0.0, 10.0)
    telemetry = HostTelemetry(
        CUDA, host="localhost", store=None, home=home, nvml=nvml, clock=lambda: next(clock)
    )
    boost = dict.fromkeys(GPUS, 690.0)
    telemetry.set_devices(m.SetDevice(caps_w=boost, cause="boost", by="governor"))
    assert limits_w(nvml) == [690.0] * 4
    telemetry.take_batches()
    return telemetry


def test_a_governor_that_crashes_or_is_stopped_leaves_caps_as_they_were_found(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for crashes in (False, True):
        telemetry = boosted(nvml, tmp_path)
        stop = threading.Event()
        if crashes:

            def crash(_now: float, _dt_s: float) -> dict[str, Reading]:
                raise RuntimeError("a bug")

            monkeypatch.setattr(telemetry.power, "tick", crash)
            monkeypatch.setattr("runtime.control.telemetry.PERIOD_S", 0.01)
            with pytest.raises(RuntimeError):
                telemetry.run_forever(stop, lambda _gpu: None)
        else:
            stop.set()
            telemetry.run_forever(stop, lambda _gpu: None)
        assert limits_w(nvml) == [650.0] * 4
        assert not file_of(tmp_path).exists()


def test_caps_go_back_when_the_run_ends_and_the_journal_hears_of_it(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    telemetry = boosted(nvml, tmp_path)
    telemetry.return_caps()
    (batch,) = telemetry.take_batches()
    assert (batch.by, batch.from_w, batch.to_w) == ("agent", (690.0,) * 4, (650.0,) * 4)
    assert "the run ended" in batch.cause
    assert limits_w(nvml) == [650.0] * 4
    assert file_of(tmp_path).exists(), "until the agent ends, it may set caps again"
    telemetry.power.close(9.0)
    assert telemetry.take_batches() == []
    assert not file_of(tmp_path).exists()


def test_another_card_in_the_slot_is_not_given_its_predecessors_cap(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    PriorFile(file_of(tmp_path)).write(
        PriorCaps(at=0.0, caps_w={"r/0": 300.0}, uuids={"r/0": "GPU-of-before"})
    )
    power = start(nvml, tmp_path)
    power.close(1.0)
    assert limits_w(nvml)[0] == 650.0


@pytest.mark.parametrize("content", [b"", b"{", b'{"at": 1}', b"\xff\xfe"])
def test_a_spoilt_file_stops_nobody(nvml: FakeNvml, tmp_path: Path, content: bytes) -> None:
    file_of(tmp_path).parent.mkdir(parents=True)
    file_of(tmp_path).write_bytes(content)
    power = start(nvml, tmp_path)
    power.close(1.0)
    assert limits_w(nvml) == [650.0] * 4


def test_a_budget_cut_that_still_holds_at_the_end_is_not_broken(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    power = start(nvml, tmp_path)
    power.set_budget("r", 2000.0, 1.0, "facility")
    assert sum(limits_w(nvml)) <= 2000.0
    power.close(2.0)
    assert sum(limits_w(nvml)) <= 2000.0
    assert file_of(tmp_path).exists(), "the next start gives the rest back"


def test_without_permission_it_offers_no_boost_and_names_the_command(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    nvml.root = False
    power = start(nvml, tmp_path)
    assert "sudo nvidia-smi -i 0 -pl 650" in power.offer().obstacle
    batch = power.take_batches()[0]
    assert batch.slots == ()
    assert batch.refused[2].endswith("sudo nvidia-smi -i 2 -pl 600")
    power.tick(1.0, 1.0)
    power.tick(2.0, 1.0)
    assert power.take_batches() == [], "the same refusal is told once"
    power.close(3.0)
    assert limits_w(nvml) == [650.0] * 4


def test_a_driver_reload_is_seen_and_caps_are_set_again(nvml: FakeNvml) -> None:
    power = start(nvml, None)
    power.want({"r/0": 690.0}, 1.0, "boost", "governor")
    power.take_batches()
    nvml.driver_loaded = False
    readings = power.tick(2.0, 1.0)
    assert readings["r/0"].power_w == 0.0
    nvml.driver_loaded = True
    nvml.reload_driver()
    power.tick(3.0, 1.0)
    assert sum(limits_w(nvml)) <= RACK.power_budget_w
    power.want({"r/0": 690.0, "r/1": 600.0, "r/2": 600.0, "r/3": 600.0}, 4.0, "g", "controller")
    power.tick(5.0, 1.0)
    assert limits_w(nvml) == [690.0, 600.0, 600.0, 600.0]


def test_another_tools_cap_is_set_back(nvml: FakeNvml) -> None:
    power = start(nvml, None)
    power.take_batches()
    nvml.gpus[1].limit_mw = 700_000
    power.tick(1.0, 1.0)
    assert limits_w(nvml) == [600.0] * 4
    assert "without us" in power.take_batches()[0].cause


def test_a_lost_gpu_frees_its_watts_only_once_it_does_not_answer(nvml: FakeNvml) -> None:
    power = start(nvml, None)
    power.worker_exited("r/3", 1.0)
    assert limits_w(nvml)[3] == 200.0, "it still draws: its lowest cap"
    power.want({"r/0": 700.0, "r/1": 700.0, "r/2": 700.0, "r/3": 0.0}, 2.0, "boost", "governor")
    assert sum(limits_w(nvml)) <= RACK.power_budget_w
    gone = nvml.gpus.pop(3)
    power.tick(3.0, 1.0)
    assert power.ledger("r").sum_w == sum(limits_w(nvml))
    nvml.gpus.append(gone)
    power.tick(4.0, 1.0)
    assert power.ledger("r").sum_w == sum(limits_w(nvml)) <= RACK.power_budget_w


def test_a_boost_that_nobody_watches_is_taken_back(nvml: FakeNvml) -> None:
    power = start(nvml, None)
    power.want({"r/0": 690.0}, 0.0, "boost", "governor")
    for second in range(1, 4):
        power.tick(float(second), 1.0)
    assert limits_w(nvml)[0] == 690.0
    power.watched(5.0)
    power.tick(5.0 + UNWATCHED_S, 1.0)
    assert limits_w(nvml)[0] == 690.0
    power.tick(6.0 + UNWATCHED_S, 1.0)
    assert limits_w(nvml)[0] == 600.0
    assert "controller is away" in power.take_batches()[-1].cause


def test_a_throttle_takes_the_boost_back_within_one_tick(nvml: FakeNvml) -> None:
    power = start(nvml, None)
    power.want({"r/0": 690.0, "r/1": 690.0}, 1.0, "boost", "governor")
    nvml.gpus[0].reasons = 0x40  # HwThermalSlowdown
    power.tick(2.0, 1.0)
    assert limits_w(nvml)[:2] == [600.0, 690.0]


def test_a_dry_run_reports_but_devices_stay_as_they_are() -> None:
    config = Config(
        cluster=ClusterConfig(racks=(RackConfig(name="r", gpus=4),)),
        power=PowerConfig(backend="dry_run"),
    )
    devices = {gpu: EmulatedDevice(EmulatedConfig()) for gpu in GPUS}
    backends = open_backends(config, GPUS, devices)
    power = HostPower(config, config.cluster.racks, backends, now=0.0)
    power.set_budget("r", 3600.0, 1.0, "facility")
    assert power.take_batches()[0].to_w == (900.0,) * 4
    dry = backends["r/0"]
    assert isinstance(dry, DryRun)
    assert list(dry.would_set) == [(1000.0, 900.0)]
    assert devices["r/0"].cap_w == 1000.0


class WatchedNvml(FakeNvml):
    """Looks at every limit as it is set: one that goes up must fit into the budget."""

    budget_w = RACK.power_budget_w

    def nvmlDeviceSetPowerManagementLimit(self, handle: Any, limit_mw: int) -> None:  # noqa: N802
        before = sum(limits_w(self))
        super().nvmlDeviceSetPowerManagementLimit(handle, limit_mw)
        after = sum(limits_w(self))
        assert after <= max(before, self.budget_w) + 1e-6, (before, after, self.budget_w)


class History:
    """One host, and what may happen to it; each method takes a slot and a number of watts."""

    def __init__(self, home: Path) -> None:
        self.nvml = WatchedNvml([FakeGpu(f"GPU-{slot}", limit_mw=650_000) for slot in range(4)])
        self.home, self.now = home, 0.0
        self.power = start(self.nvml, home)

    def want(self, slot: int, cap_w: float) -> None:
        self.power.want({GPUS[slot]: cap_w}, self.now, "wished", "governor")

    def budget(self, _slot: int, budget_w: float) -> None:
        self.nvml.budget_w = 700.0 + 2.5 * budget_w
        self.power.set_budget("r", self.nvml.budget_w, self.now, "facility")

    def exits(self, slot: int, _w: float) -> None:
        self.power.worker_exited(GPUS[slot], self.now)

    def starts(self, slot: int, _w: float) -> None:
        self.power.worker_started(GPUS[slot], self.now)

    def ignores(self, slot: int, _w: float) -> None:
        self.nvml.gpus[slot].ignores_sets = not self.nvml.gpus[slot].ignores_sets

    def throttles(self, slot: int, _w: float) -> None:
        self.nvml.gpus[slot].reasons ^= 0x40

    def tick(self, _slot: int, _w: float) -> None:
        self.power.tick(self.now, 1.0)

    def crash(self, _slot: int, _w: float) -> None:
        # The next agent knows the configured budget until a controller tells it another.
        self.nvml.budget_w = RACK.power_budget_w
        self.power = start(self.nvml, self.home, self.now)

    def stop(self, slot: int, w: float) -> None:
        self.power.close(self.now)
        self.crash(slot, w)

    def all_is_well_again(self) -> None:
        for fake in self.nvml.gpus:
            fake.ignores_sets, fake.reasons = False, 0
        self.nvml.budget_w = RACK.power_budget_w
        self.power.set_budget("r", RACK.power_budget_w, self.now, "facility")
        for _ in range(20):  # Longer than the longest hold after heat.
            self.now += 100.0
            self.power.tick(self.now, 100.0)


KINDS = ["want", "budget", "exits", "starts", "ignores", "throttles", "tick", "crash", "stop"]


@settings(max_examples=100, deadline=None)
@example([("want", 0, 690.0), ("ignores", 0, 0.0), ("stop", 0, 0.0)])
@example([("want", 0, 0.0), ("ignores", 0, 0.0), ("crash", 0, 0.0), ("stop", 0, 0.0)])
@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.floats(0.0, 900.0)), max_size=30
    )
)
def test_no_history_of_a_host_passes_the_budget_at_any_time(
    events: list[tuple[str, int, float]],
) -> None:
    """Crashes and restarts of the agent among them: after its end all is as it was found."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        history = History(Path(folder))
        for kind, slot, value in events:
            history.now += 1.0
            getattr(history, kind)(slot, value)
        history.all_is_well_again()
        history.power.close(history.now)
        # A limit read back within 1 W of the one that was set counts as taken, at each restart.
        assert limits_w(history.nvml) == pytest.approx([650.0] * 4, abs=3.0)
        assert not file_of(history.home).exists()


def test_what_could_not_be_restored_at_once_is_not_forgotten(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    start(nvml, tmp_path)  # Killed: it leaves the normal cap of 600 W behind.
    nvml.gpus[2].ignores_sets = True
    second = start(nvml, tmp_path, now=5.0)
    nvml.gpus[2].ignores_sets = False
    second.close(6.0)
    assert limits_w(nvml) == [650.0] * 4, "not what stood when it could not be restored"
