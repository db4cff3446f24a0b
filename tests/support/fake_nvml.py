"""A module that speaks nvidia-ml-py's interface, with GPUs that fail on demand."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml


@dataclass
class FakeGpu:
    """error: every call on the GPU raises this NVML code. unsupported: functions it lacks."""

    pci: str
    uuid: str
    serial: str = "1650000000001"
    temp_c: int = 40
    power_mw: int = 300_000
    ecc_uncorrected: int = 0
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    reasons: int = 0
    recovery: int = 0
    link_errors: int = 0
    fabric: int = 0
    error: int = 0
    unsupported: set[str] = field(default_factory=set)


class FakeNvml:
    """init_error: what nvmlInit raises. driver_loaded False: every call is "uninitialized"."""

    def __init__(self, gpus: list[FakeGpu]) -> None:
        self.gpus = gpus
        self.init_error = 0
        self.driver_loaded = False
        self.num_inits = 0
        self.events: deque[SimpleNamespace] = deque()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVML", "nvmlEventType", "nvmlClocks", "c_nvml")):
            return getattr(pynvml, name)
        raise AttributeError(name)

    # what a test does ------------------------------------------------------------------------

    def xid(self, gpu: FakeGpu, code: int) -> None:
        self.events.append(
            SimpleNamespace(
                device=gpu, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=code
            )
        )

    def reload_driver(self) -> None:
        self.driver_loaded = False

    # the interface ---------------------------------------------------------------------------

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error:
            raise pynvml.NVMLError(self.init_error)
        self.driver_loaded = True
        self.num_inits += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._check()
        self.driver_loaded = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        self._check(self.gpus[index])
        return self.gpus[index]

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> SimpleNamespace:  # noqa: N802
        self._check()
        return SimpleNamespace(busId=gpu.pci.encode())

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        return self._value(gpu, "uuid", gpu.uuid)

    def nvmlDeviceGetSerial(self, gpu: FakeGpu) -> str:  # noqa: N802
        return self._value(gpu, "serial", gpu.serial)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, _sensor: int) -> int:  # noqa: N802
        return self._value(gpu, "temperature", gpu.temp_c)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:  # noqa: N802
        return self._value(gpu, "power", gpu.power_mw)

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> int:  # noqa: N802
        assert (kind, counter) == (1, 0)
        return self._value(gpu, "ecc", gpu.ecc_uncorrected)

    def nvmlDeviceGetRemappedRows(self, gpu: FakeGpu) -> tuple[int, int, int, int]:  # noqa: N802
        return self._value(gpu, "rows", gpu.rows)

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:  # noqa: N802
        return self._value(gpu, "reasons", gpu.reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:  # noqa: N802
        return self._value(gpu, "old_reasons", gpu.reasons)

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, fields: list[Any]) -> list[SimpleNamespace]:  # noqa: N802
        if fields[0] == (pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS, 0):
            count = self._value(gpu, "nvlink5", gpu.link_errors)
            here, gone = SimpleNamespace(ullVal=count), pynvml.NVML_ERROR_NOT_SUPPORTED
            return [
                SimpleNamespace(nvmlReturn=0 if link < 2 else gone, value=here)
                for _, link in fields
            ]
        assert fields == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        self._value(gpu, "fields", 0)
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=gpu.recovery))]

    def nvmlDeviceGetNvLinkErrorCounter(self, gpu: FakeGpu, link: int, _kind: int) -> int:  # noqa: N802
        if link >= 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._value(gpu, "nvlink", gpu.link_errors)

    def nvmlDeviceGetGpuFabricInfoV(self, gpu: FakeGpu, info: Any) -> int:  # noqa: N802
        info._obj.healthMask = self._value(gpu, "fabric", gpu.fabric)
        return pynvml.NVML_SUCCESS

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        self._check()
        return object()

    def nvmlEventSetFree(self, _events: object) -> None:  # noqa: N802
        self._check()

    def nvmlDeviceGetSupportedEventTypes(self, gpu: FakeGpu) -> int:  # noqa: N802
        return self._value(gpu, "events", pynvml.nvmlEventTypeXidCriticalError)

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, _mask: int, _events: object) -> None:  # noqa: N802
        self._value(gpu, "events", 0)

    def nvmlEventSetWait_v2(self, _events: object, timeout_ms: int) -> SimpleNamespace:  # noqa: N802
        self._check()
        if self.events:
            return self.events.popleft()
        time.sleep(min(timeout_ms, 5) / 1000)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    def _check(self, gpu: FakeGpu | None = None) -> None:
        if not self.driver_loaded:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if gpu is not None and gpu.error:
            raise pynvml.NVMLError(gpu.error)

    def _value(self, gpu: FakeGpu, name: str, value: Any) -> Any:
        self._check(gpu)
        if name in gpu.unsupported:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value
