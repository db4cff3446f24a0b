"""Health: kernel log lines a second, and the core it takes to watch a rack of 72 GPUs.

One second's work is 10,000 kernel log lines and ten looks at 72 GPUs through NVML (a stand-in that
answers at once), placed, filtered and judged. The share is processor time over that second.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from runtime.bench.benchmark import Benchmark, Figures, Say, Target
from runtime.health.address_map import AddressMap
from runtime.health.catalogue import load_catalogue
from runtime.health.config import VerdictConfig
from runtime.health.fail_slow import SlowDetector
from runtime.health.kernel_log import KernelLogReader
from runtime.health.observation import Observation
from runtime.health.sources.nvml import NvmlSource
from runtime.health.sources.watch import Watch
from runtime.health.verdict import VerdictBook

LINES_A_SECOND = 10_000
GPUS = 72
LOOKS_A_SECOND = 10
SECONDS = 5
YEAR = 2026
_TEMPLATES = (
    "[{t}] NVRM: Xid (PCI:{p}): 31, pid={n}, name=train, Ch 00000012, engmask 00000101",
    "[{t}] NVRM: Xid (PCI:{p}): 45, pid={n}, name=train, Ch 00000001 caused by previous Xid 149",
    "[{t}] NVRM: Xid (PCI:{p}): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x025525c6 0x00000000)",
    "[{t}] NVRM: Xid (PCI:{p}): 119, pid={n}, name=x, Expected function 103 (GSP_RM_ALLOC) (0x1).",
    "[{t}] NVRM: GPU4 RPC history (CPU -> GSP):",
    "Mar  4 08:00:01 node-7 kernel: [{t}] mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE",
    "Mar  4 08:00:01 node-7 kernel: [{t}] EXT4-fs (md127p3): re-mounted r/w. Quota mode: none.",
    "Mar  4 08:00:01 node-7 systemd[1]: Started journal service number {n}.",
)  # fmt: skip


def kernel_lines(count: int) -> Iterator[str]:
    """A bad second: half of the lines are the driver's, and most of those are Xids."""
    for number in range(count):
        template = _TEMPLATES[number % len(_TEMPLATES)]
        pci = f"0000:{number % GPUS:02x}:00"
        yield template.format(t=f"{number / 100:.6f}", p=pci, n=number) + "\n"


class _StillNvml:
    """Speaks as much of nvidia-ml-py as the source asks for; every GPU is well."""

    def __init__(self) -> None:
        self._real = importlib.import_module("pynvml")
        fixed: dict[str, Any] = {
            "nvmlDeviceGetCount": GPUS,
            "nvmlDeviceGetSerial": "",
            "nvmlDeviceGetTemperature": 55,
            "nvmlDeviceGetPowerUsage": 900_000,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceGetCurrentClocksEventReasons": 4,
            "nvmlDeviceGetNvLinkErrorCounter": 0,
            "nvmlDeviceGetSupportedEventTypes": 8,
            "nvmlDeviceGetGpuFabricInfoV": 0,
            "nvmlDeviceGetFieldValues": [
                SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=0))
            ],
        }
        self._calls: dict[str, Callable[..., Any]] = {
            name: _always(value) for name, value in fixed.items()
        } | {
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda index: f"GPU-{index + 1:08x}",
            "nvmlDeviceGetPciInfo": lambda index: SimpleNamespace(
                busId=f"00000000:{index:02x}:00.0"
            ),
            "nvmlEventSetWait_v2": self._no_event,
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVML", "nvmlEventType", "c_nvml")):
            return getattr(self._real, name)
        return self._calls.get(name, _always(None))

    def _no_event(self, *_args: Any) -> None:
        raise self._real.NVMLError(self._real.NVML_ERROR_TIMEOUT)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_args: value


def measure(say: Say) -> dict[str, Any]:
    """Figures: lines_per_s, core_share, and what the share is made of."""
    catalogue = load_catalogue()
    lines = list(kernel_lines(LINES_A_SECOND * SECONDS))
    say(f"reading {len(lines)} kernel log lines")
    reader = KernelLogReader(catalogue, YEAR)
    began, cpu = time.perf_counter(), time.process_time()
    events = sum(1 for _ in reader.read(lines))
    lines_s, lines_cpu_s = time.perf_counter() - began, time.process_time() - cpu
    say(f"looking at {GPUS} GPUs {LOOKS_A_SECOND * SECONDS} times")
    looks_cpu_s = _look(LOOKS_A_SECOND * SECONDS)
    return {
        "lines_per_s": round(len(lines) / lines_s),
        "core_share": round((lines_cpu_s + looks_cpu_s) / SECONDS, 4),
        "lines_core_share": round(lines_cpu_s / SECONDS, 4),
        "gpus_core_share": round(looks_cpu_s / SECONDS, 4),
        "events": events,
        "gpus": GPUS,
        "looks_per_s": LOOKS_A_SECOND,
    }


def _look(times: int) -> float:
    """Processor seconds of as many looks at the rack, and of one step's shares for every ten."""
    gpus = [f"rack-0/{slot}" for slot in range(GPUS)]
    book, detector, told = VerdictBook(VerdictConfig()), SlowDetector(), list[Observation]()
    source = NvmlSource(load_catalogue(), nvml=_StillNvml())
    watch = Watch([source], addresses=AddressMap(gpus), sink=told.append, poll_s=0.1)
    source.open()
    cpu = time.process_time()
    for number in range(times):
        watch.take(source, source.poll(0.0))
        book.tick(float(number))
        if number % LOOKS_A_SECOND == 0:
            detector.take(float(number), {gpu: 1.0 + slot / 1e4 for slot, gpu in enumerate(gpus)})
    spent = time.process_time() - cpu
    source.close()
    assert not told, "every GPU is well: there is no news"
    return spent


def targets(_: Figures) -> list[Target]:
    return [
        Target(
            figure="core_share",
            at_most=0.20,
            why="10,000 kernel log lines and ten looks at 72 GPUs, every second",
        )
    ]


BENCHMARK = Benchmark(
    name="health",
    summary="kernel log lines a second, and the share of a core that watching a rack takes",
    measure=measure,
    targets=targets,
)
