"""A module that speaks the power side of nvidia-ml-py's interface, with GPUs that fail on demand.

Its limits outlive whoever set them, as in a driver: a killed agent leaves them behind.
"""

# ruff: noqa: N802 - the names are NVML's
from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

MODULE = 1


@dataclass
class FakeGpu:
    """Milliwatts. error: every call raises this NVML code. unsupported: functions it lacks.

    module_mw: (lowest, limit, highest) of the whole module on a Grace part. clamps_to_mw: the most
    it enforces, whatever is set.
    """

    uuid: str
    low_mw: int = 200_000
    high_mw: int = 700_000
    default_mw: int = 700_000
    limit_mw: int = 700_000
    draw_mw: int = 512_345
    temp_c: int = 41
    reasons: int = 0
    error: int = 0
    unsupported: set[str] = field(default_factory=set)
    module_mw: list[int] | None = None
    ignores_sets: bool = False


class FakeNvml:
    """root: whether limits may be set. driver_loaded False: calls say so, limits are lost.

    sets: (uuid, scope, milliwatts) of every limit that was taken.
    """

    def __init__(self, gpus: list[FakeGpu], *, root: bool = True) -> None:
        self.gpus = gpus
        self.root = root
        self.init_error = 0
        self.driver_loaded = True
        self.num_open = 0
        self.sets: list[tuple[str, int, int]] = []
        self._era = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVML", "nvmlClocks")):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def reload_driver(self) -> None:
        """Handles are void, every limit is the default again, NVML has to be initialised anew."""
        self._era += 1
        self.num_open = 0
        for gpu in self.gpus:
            gpu.limit_mw = gpu.default_mw

    # the interface ---------------------------------------------------------------------------

    def nvmlInit(self) -> None:
        if self.init_error:
            raise pynvml.NVMLError(self.init_error)
        if not self.driver_loaded:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self._ready()
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._ready()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self._ready()
        if not 0 <= index < len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return (self._era, self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        self._ready()
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return (self._era, gpu)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return self._gpu(handle, "nvmlDeviceGetUUID").uuid

    def nvmlDeviceGetIndex(self, handle: Any) -> int:
        return self.gpus.index(self._gpu(handle, "nvmlDeviceGetIndex"))

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: Any) -> list[int]:
        gpu = self._gpu(handle, "nvmlDeviceGetPowerManagementLimitConstraints")
        return [gpu.low_mw, gpu.high_mw]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        return self._gpu(handle, "nvmlDeviceGetEnforcedPowerLimit").limit_mw

    def nvmlDeviceGetPowerManagementLimit(self, handle: Any) -> int:
        return self._gpu(handle, "nvmlDeviceGetPowerManagementLimit").limit_mw

    def nvmlDeviceSetPowerManagementLimit(self, handle: Any, limit_mw: int) -> None:
        gpu = self._gpu(handle, "nvmlDeviceSetPowerManagementLimit")
        if not self.root:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        if not gpu.low_mw <= limit_mw <= gpu.high_mw:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if not gpu.ignores_sets:
            gpu.limit_mw = limit_mw
            self.sets.append((gpu.uuid, 0, limit_mw))

    def nvmlDeviceSetPowerManagementLimit_v2(
        self, handle: Any, scope: int, limit_mw: int, version: int = 0
    ) -> int:
        """Like nvidia-ml-py's, it never reports an error."""
        gpu = self._gpu(handle, "nvmlDeviceSetPowerManagementLimit_v2")
        if self.root and gpu.module_mw and gpu.module_mw[0] <= limit_mw <= gpu.module_mw[2]:
            gpu.module_mw[1] = limit_mw
            self.sets.append((gpu.uuid, scope, limit_mw))
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetFieldValues(self, handle: Any, fields: list[Any]) -> list[Any]:
        gpu = self._gpu(handle, "nvmlDeviceGetFieldValues")
        return [self._field(gpu, *one) for one in fields]

    def _field(self, gpu: FakeGpu, number: int, scope: int) -> Any:
        place = {
            pynvml.NVML_FI_DEV_POWER_MIN_LIMIT: 0,
            pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT: 1,
            pynvml.NVML_FI_DEV_POWER_REQUESTED_LIMIT: 1,
            pynvml.NVML_FI_DEV_POWER_MAX_LIMIT: 2,
        }
        if gpu.module_mw is None or scope != MODULE:
            return SimpleNamespace(
                nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED, value=SimpleNamespace(uiVal=0)
            )
        if number == pynvml.NVML_FI_DEV_POWER_INSTANT:
            value = gpu.draw_mw + 100_000
        else:
            value = gpu.module_mw[place[number]]
        return SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=value))

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._gpu(handle, "nvmlDeviceGetPowerUsage").draw_mw

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return self._gpu(handle, "nvmlDeviceGetTemperature").temp_c

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        self._gpu(handle, "nvmlDeviceGetClockInfo")
        return 1755

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        self._gpu(handle, "nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return self._gpu(handle, "nvmlDeviceGetCurrentClocksEventReasons").reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return self._gpu(handle, "nvmlDeviceGetCurrentClocksThrottleReasons").reasons

    # inside ----------------------------------------------------------------------------------

    def _ready(self) -> None:
        if not self.driver_loaded or self.num_open < 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def _gpu(self, handle: Any, function: str) -> FakeGpu:
        self._ready()
        era, gpu = handle
        if gpu not in self.gpus or era != self._era:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if gpu.error:
            raise pynvml.NVMLError(gpu.error)
        if function in gpu.unsupported:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu
