"""One contract, every power backend; and what is NVML's own, over a fake NVML."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml
import pytest

from runtime.config import ClusterConfig, Config, EmulatedConfig, RackConfig
from runtime.power.backends.dry_run import DryRun
from runtime.power.backends.nvml import NvmlGpu
from runtime.power.backends.nvml_errors import (
    DeviceBusy,
    DriverAway,
    GpuLost,
    LibraryMissing,
    LimitRefused,
    ResetRequired,
)
from runtime.power.backends.opening import open_backends, visible_indices
from runtime.power.config import PowerConfig
from runtime.power.emulated import EmulatedDevice
from runtime.power.port import (
    CapError,
    CapOutOfRange,
    DeviceGone,
    NoPermission,
    NotSupported,
    PowerBackend,
)
from tests.support.fake_nvml_power import FakeGpu, FakeNvml


@dataclass
class Case:
    """A backend and what its device really enforces."""

    backend: PowerBackend
    enforced_w: Callable[[], float]
    sets_really: bool = True


def emulated() -> Case:
    device = EmulatedDevice(EmulatedConfig(normal_cap_w=500.0, max_cap_w=700.0))
    return Case(device, lambda: device.cap_w)


def dry_run() -> Case:
    device = EmulatedDevice(EmulatedConfig(normal_cap_w=500.0, max_cap_w=700.0))
    return Case(DryRun("r/0", device), lambda: device.cap_w, sets_really=False)


def nvml() -> Case:
    fake = FakeNvml([FakeGpu("GPU-0", limit_mw=500_000)])
    return Case(NvmlGpu(fake, 0), lambda: fake.gpus[0].limit_mw / 1000)


def nvml_module() -> Case:
    fake = FakeNvml([FakeGpu("GPU-0", module_mw=[200_000, 500_000, 700_000])])
    gpu = fake.gpus[0]
    return Case(NvmlGpu(fake, 0), lambda: (gpu.module_mw or [0, 0])[1] / 1000)


@pytest.fixture(params=[emulated, dry_run, nvml, nvml_module], ids=lambda one: one.__name__)
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = request.param()
    return made


def test_limits_hold_the_normal_cap(case: Case) -> None:
    limits = case.backend.limits()
    assert (limits.min_w, limits.normal_w, limits.max_w) == (200.0, 500.0, 700.0)
    assert case.backend.obstacle == ""
    assert case.backend.read().cap_w == 500.0
    assert case.enforced_w() == 500.0, "opening changes nothing"


def test_a_cap_is_set_and_read_back(case: Case) -> None:
    case.backend.set_cap(612.0)
    assert case.backend.read().cap_w == 612.0
    assert case.enforced_w() == (612.0 if case.sets_really else 500.0)
    case.backend.set_cap(200.0)
    case.backend.set_cap(700.0)
    assert case.backend.read().cap_w == 700.0


@pytest.mark.parametrize("cap_w", [199.0, 701.0, 0.0, -5.0, math.nan, math.inf])
def test_out_of_range_changes_nothing(case: Case, cap_w: float) -> None:
    with pytest.raises(CapOutOfRange, match="choose 200 to 700 W"):
        case.backend.set_cap(cap_w)
    assert case.backend.read().cap_w == 500.0
    assert case.enforced_w() == 500.0


def test_a_reading_has_physical_numbers(case: Case) -> None:
    reading = case.backend.read()
    assert reading.power_w > 0.0
    assert 20.0 < reading.temp_c < 100.0
    assert 0.0 <= reading.util <= 1.0
    assert reading.clock_mhz > 0.0
    assert not reading.throttled


def test_caps_stay_when_it_is_closed(case: Case) -> None:
    case.backend.set_cap(600.0)
    stands = case.enforced_w()
    case.backend.close()
    case.backend.close()
    assert case.enforced_w() == stands


# dry run ---------------------------------------------------------------------------------------


def test_a_dry_run_says_what_it_would_set() -> None:
    said: list[str] = []
    dry = DryRun("r/3", EmulatedDevice(EmulatedConfig()), said.append)
    dry.set_cap(1100.0)
    dry.set_cap(1000.0)
    assert list(dry.would_set) == [(1000.0, 1100.0), (1100.0, 1000.0)]
    assert said[0] == "dry run: r/3 would go from 1000 W to 1100 W"


# NVML ------------------------------------------------------------------------------------------


def one_gpu(**fields: Any) -> tuple[FakeNvml, FakeGpu]:
    gpu = FakeGpu("GPU-0", **fields)
    return FakeNvml([FakeGpu("GPU-other"), gpu]), gpu


def test_nvml_counts_milliwatts_and_reads_everything() -> None:
    fake, gpu = one_gpu(draw_mw=512_345, temp_c=66, limit_mw=650_000)
    reading = NvmlGpu(fake, 1).read()
    assert (reading.power_w, reading.temp_c, reading.cap_w) == (512.345, 66.0, 650.0)
    assert (reading.util, reading.clock_mhz) == (0.87, 1755.0)
    gpu.reasons = pynvml.nvmlClocksThrottleReasonSwPowerCap
    backend = NvmlGpu(fake, 1)
    assert not backend.read().throttled, "its own cap at work is no throttling"
    gpu.reasons = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    assert backend.read().throttled


def test_a_normal_cap_of_the_config_is_kept_within_the_limits() -> None:
    fake, _ = one_gpu()
    assert NvmlGpu(fake, 1, normal_w=600.0).limits().normal_w == 600.0
    assert NvmlGpu(fake, 1, normal_w=900.0).limits().normal_w == 700.0


def test_no_permission_is_known_at_once_and_names_the_command() -> None:
    fake, gpu = one_gpu()
    fake.root = False
    backend = NvmlGpu(fake, 1)
    assert backend.obstacle.endswith("an administrator can run: sudo nvidia-smi -i 1 -pl 700")
    with pytest.raises(NoPermission, match=r"sudo nvidia-smi -i 1 -pl 512$"):
        backend.set_cap(512.0)
    assert gpu.limit_mw == 700_000
    assert fake.sets == []


def test_no_permission_on_a_module_is_known_although_nvml_does_not_tell() -> None:
    fake, gpu = one_gpu(
        module_mw=[200_000, 900_000, 1_000_000],
        unsupported={"nvmlDeviceSetPowerManagementLimit"},
    )
    fake.root = False
    backend = NvmlGpu(fake, 1)
    assert backend.obstacle.endswith("sudo nvidia-smi -i 1 -pl 900 -sc 1")
    with pytest.raises(CapError, match="keeps a power limit of 900 W"):
        backend.set_cap(950.0)
    fake.root = True
    backend = NvmlGpu(fake, 1)
    assert backend.obstacle == ""
    assert gpu.module_mw == [200_000, 900_000, 1_000_000], "probing leaves the limit as it was"
    backend.set_cap(950.0)
    assert fake.sets[-1] == ("GPU-0", 1, 950_000)
    assert backend.read().power_w == pytest.approx(612.345), "the module's draw, not the GPU's"


def test_read_only_never_sets_and_never_probes() -> None:
    fake, gpu = one_gpu()
    backend = NvmlGpu(fake, 1, read_only=True)
    assert (backend.name, "read_only" in backend.obstacle) == ("nvml_read_only", True)
    with pytest.raises(NoPermission):
        backend.set_cap(500.0)
    assert (fake.sets, gpu.limit_mw) == ([], 700_000)


def test_a_limit_that_nvml_ignores_is_an_error() -> None:
    fake, gpu = one_gpu()
    backend = NvmlGpu(fake, 1)
    gpu.ignores_sets = True
    with pytest.raises(CapError, match="keeps a power limit of 700 W where 500 W was set"):
        backend.set_cap(500.0)


CODES = [
    (pynvml.NVML_ERROR_GPU_IS_LOST, GpuLost, "fallen off the bus"),
    (pynvml.NVML_ERROR_NOT_FOUND, GpuLost, "no longer there"),
    (pynvml.NVML_ERROR_RESET_REQUIRED, ResetRequired, "sudo nvidia-smi --gpu-reset -i 1"),
    (pynvml.NVML_ERROR_UNINITIALIZED, DriverAway, "reloaded"),
    (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, DriverAway, "sudo modprobe nvidia"),
    (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, DriverAway, "different versions"),
    (pynvml.NVML_ERROR_NO_PERMISSION, NoPermission, "sudo nvidia-smi -i 1 -pl 500"),
    (pynvml.NVML_ERROR_OPERATING_SYSTEM, NoPermission, "container"),
    (pynvml.NVML_ERROR_NOT_SUPPORTED, NotSupported, "not supported by this GPU"),
    (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, NotSupported, "not known to this driver"),
    (pynvml.NVML_ERROR_INVALID_ARGUMENT, LimitRefused, "invalid"),
    (pynvml.NVML_ERROR_TIMEOUT, DeviceBusy, "in time"),
    (pynvml.NVML_ERROR_INSUFFICIENT_POWER, DeviceBusy, "external power"),
]


@pytest.mark.parametrize(("code", "kind", "words"), CODES, ids=lambda one: str(one)[:30])
def test_each_code_is_an_error_of_its_own(code: int, kind: type[Exception], words: str) -> None:
    fake, gpu = one_gpu()
    backend = NvmlGpu(fake, 1)
    gpu.error = code
    with pytest.raises(kind, match=words):
        backend.set_cap(500.0)


def test_an_unknown_code_still_names_gpu_and_code() -> None:
    fake, gpu = one_gpu()
    backend = NvmlGpu(fake, 1)
    gpu.error = pynvml.NVML_ERROR_UNKNOWN
    with pytest.raises(Exception, match="GPU 1: NVML error 999"):
        backend.set_cap(500.0)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, LibraryMissing),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, DriverAway),
    ],
)
def test_without_nvml_it_does_not_open(code: int, kind: type[Exception]) -> None:
    fake, _ = one_gpu()
    fake.init_error = code
    with pytest.raises(kind):
        NvmlGpu(fake, 0)


def test_an_index_that_is_not_there_says_how_many_there_are() -> None:
    fake, _ = one_gpu()
    with pytest.raises(GpuLost, match="no GPU 5; NVML sees 2"):
        NvmlGpu(fake, 5)


def test_what_a_part_cannot_tell_is_nan() -> None:
    fake, _ = one_gpu(
        unsupported={
            "nvmlDeviceGetPowerUsage",
            "nvmlDeviceGetUtilizationRates",
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetCurrentClocksEventReasons",
        }
    )
    reading = NvmlGpu(fake, 1).read()
    assert math.isnan(reading.power_w)
    assert math.isnan(reading.util)
    assert reading.cap_w == 700.0


def test_a_part_whose_limit_cannot_be_set_says_so() -> None:
    fake, _ = one_gpu(unsupported={"nvmlDeviceSetPowerManagementLimit"})
    assert NvmlGpu(fake, 1).obstacle == "this GPU's power limit cannot be set"


def test_a_driver_reload_is_got_over() -> None:
    fake, _ = one_gpu()
    backend = NvmlGpu(fake, 1)
    backend.set_cap(500.0)
    fake.driver_loaded = False
    for _ in range(3):
        with pytest.raises(DriverAway):
            backend.read()
    fake.driver_loaded = True
    fake.reload_driver()
    assert backend.read().cap_w == 700.0, "the limit is lost with the driver, and that is seen"
    backend.set_cap(500.0)
    assert backend.read().cap_w == 500.0


def test_a_removed_gpu_comes_back_under_its_uuid_and_a_new_index() -> None:
    fake, gpu = one_gpu()
    backend = NvmlGpu(fake, 1)
    fake.gpus.remove(gpu)
    with pytest.raises(GpuLost):
        backend.read()
    with pytest.raises(GpuLost):
        backend.set_cap(500.0)
    fake.gpus.insert(0, gpu)
    assert backend.read().cap_w == 700.0
    fake.root = False
    with pytest.raises(NoPermission, match="-i 0 -pl 500"):
        backend.set_cap(500.0)


# choosing --------------------------------------------------------------------------------------


def cuda_config(backend: str = "auto", **power: Any) -> Config:
    return Config(
        cluster=ClusterConfig(racks=(RackConfig(name="r", gpus=2),), device="cuda"),
        power=PowerConfig(backend=backend, **power),  # type: ignore[arg-type]
    )


def test_the_config_chooses_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeNvml([FakeGpu("GPU-0"), FakeGpu("GPU-1")])
    gpus = ["r/0", "r/1"]
    names = {
        kind: open_backends(cuda_config(kind), gpus, {}, fake)["r/1"].name
        for kind in ("auto", "nvml", "nvml_read_only", "dry_run")
    }
    assert names == {
        "auto": "nvml",
        "nvml": "nvml",
        "nvml_read_only": "nvml_read_only",
        "dry_run": "dry_run",
    }
    device = {gpu: EmulatedDevice(EmulatedConfig()) for gpu in gpus}
    assert open_backends(Config(), gpus, device)["r/0"].name == "emulated"
    dry = Config(power=PowerConfig(backend="dry_run"))
    assert open_backends(dry, gpus, device)["r/0"].name == "dry_run"


def test_a_dry_run_on_real_gpus_never_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeNvml([FakeGpu("GPU-0"), FakeGpu("GPU-1")])
    open_backends(cuda_config("dry_run"), ["r/0", "r/1"], {}, fake)["r/0"].set_cap(500.0)
    assert fake.sets == []


def test_a_gpu_that_cannot_be_opened_does_not_stop_the_run() -> None:
    fake = FakeNvml([FakeGpu("GPU-0")])
    backends = open_backends(cuda_config(), ["r/0", "r/1"], {}, fake)
    assert (backends["r/0"].name, backends["r/1"].name) == ("nvml", "absent")
    assert "NVML sees 1" in backends["r/1"].obstacle
    assert math.isnan(backends["r/1"].read().power_w)
    with pytest.raises(DeviceGone):
        backends["r/1"].set_cap(1000.0)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1]), ("", [0, 1]), ("3,1", [3, 1]), ("GPU-abc,GPU-def", [0, 1]), ("2", [0, 1])],
)
def test_visible_devices(visible: str | None, indices: list[int]) -> None:
    assert visible_indices(visible, 2) == indices
