"""What a calibration sweeps: an emulated device, or a real GPU under matrix products.

Imports torch and pynvml only when a real GPU is asked for.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.config import Config
from runtime.power.backends.nvml import NvmlGpu
from runtime.power.emulated import EmulatedDevice
from runtime.power.port import DeviceGone, PowerBackend

# Long enough for the emulated temperature to settle.
_SETTLE_S = 600.0
_SIZE = 8192


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A device and the work that is timed on it. pace: work per second at the present cap."""

    device: str
    backend: PowerBackend
    pace: Callable[[], float]


def emulated_bench(config: Config) -> Bench:
    """An emulated device of this config: time passes in its model, not on the clock."""
    device = EmulatedDevice(config.emulated)

    def pace() -> float:
        device.advance(_SETTLE_S, 1.0)
        return device.speed()

    return Bench(device="emulated device", backend=device, pace=pace)


def nvml_bench(config: Config, index: int, seconds: float) -> Bench:
    """A real GPU under bfloat16 matrix products; the first half of each measurement settles it.

    Raises:
        DeviceGone: no NVML, no such GPU, or torch has no CUDA.
    """
    backend = NvmlGpu(importlib.import_module("pynvml"), index, normal_w=config.power.normal_cap_w)
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise DeviceGone("torch sees no CUDA device; install a CUDA build of torch")
    device = torch.device("cuda", index)
    left, right = (torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products(for_s: float) -> float:
        torch.cuda.synchronize(device)
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < for_s:
            for _ in range(8):
                torch.matmul(left, right)
            torch.cuda.synchronize(device)
            count += 8
        return count / (time.perf_counter() - began)

    def pace() -> float:
        products(seconds / 2.0)
        return products(seconds / 2.0)

    return Bench(device=torch.cuda.get_device_name(device), backend=backend, pace=pace)
