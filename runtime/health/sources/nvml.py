"""NVML as a source: events, error counters, remapped rows, throttling, recovery action, lost GPUs.

The module that speaks NVML is handed in (`pynvml`, or a fake with its interface). Each of its
errors is met here: a value that a GPU does not support is not known, a lost GPU is a finding, a
reloaded driver means to begin again.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.health.catalogue import Catalogue
from runtime.health.observation import Identity, Observation, normal_pci
from runtime.health.reading import RECOVERY_NAMES, THROTTLE_BITS, Reading, judge
from runtime.health.sources.polled import xid_event
from runtime.health.sources.port import SourceState

_NVLINKS = 18
_NVLINK_EVERY_S = 10.0
_EVENTS_A_POLL = 1000


@dataclass
class _Device:
    """A GPU as NVML numbers it now. nvlink_base: its link errors when we came."""

    handle: Any
    identity: Identity
    nvlink_base: int | None = None
    nvlink_at: float = 0.0
    nvlink_new: int | None = None


class NvmlSource:
    """Watches every GPU of this host through NVML."""

    name = "nvml"
    waits = True

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        nvml: Any = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.state = SourceState(self.name, "missing", "not opened yet")
        self._catalogue = catalogue
        self._nvml = nvml
        self._clock = clock
        self._devices: list[_Device] = []
        self._known: dict[str, Identity] = {}
        self._events: Any = None
        self._is_up = False

    def open(self) -> SourceState:
        self.close()
        try:
            if self._nvml is None:
                self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._is_up = True
            self._find_devices()
            self._register()
        except ImportError as error:
            self.state = SourceState(self.name, "missing", f"nvidia-ml-py is not there: {error}")
        except self._nvml.NVMLError as error:
            self._failed(error)
        else:
            self.state = SourceState(self.name, "watching")
        return self.state

    def poll(self, timeout_s: float) -> Sequence[Observation]:
        if not self._is_up:
            return []
        try:
            found = self._wait(timeout_s)
            now = self._clock()
            found += [
                judge(reading, "nvml", self._catalogue, at=now)
                for reading in [*map(self._read, self._devices), *self._gone()]
            ]
        except self._nvml.NVMLError as error:
            self._failed(error)
            return []
        return found

    def identities(self) -> tuple[Sequence[Identity], bool]:
        return [device.identity for device in self._devices], True

    def close(self) -> None:
        if not self._is_up:
            return
        self._is_up = False
        for end in (self._free_events, self._nvml.nvmlShutdown):
            try:
                end()
            except self._nvml.NVMLError:
                continue  # The driver is gone; there is nothing left to let go of.

    # opening ---------------------------------------------------------------------------------

    def _find_devices(self) -> None:
        nvml = self._nvml
        self._devices = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                pci = normal_pci(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
            except nvml.NVMLError as error:
                if not self._is_lost(error):
                    raise
                continue
            uuid = _text(self._ask("nvmlDeviceGetUUID", handle) or "")
            serial = _text(self._ask("nvmlDeviceGetSerial", handle) or "")
            identity = Identity(pci=pci, uuid=uuid, serial=serial)
            self._devices.append(_Device(handle, identity))
            self._known[uuid or pci] = identity

    def _register(self) -> None:
        """Ask for events, of each GPU those that it supports."""
        nvml = self._nvml
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        self._events = self._ask("nvmlEventSetCreate")
        for device in self._devices if self._events is not None else ():
            supported = self._ask("nvmlDeviceGetSupportedEventTypes", device.handle) or 0
            if supported & wanted:
                self._ask(
                    "nvmlDeviceRegisterEvents", device.handle, supported & wanted, self._events
                )

    def _free_events(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            self._nvml.nvmlEventSetFree(events)

    # polling ---------------------------------------------------------------------------------

    def _wait(self, timeout_s: float) -> list[Observation]:
        """Events that came within the time."""
        nvml, found = self._nvml, list[Observation]()
        if self._events is None:
            time.sleep(timeout_s)
            return found
        deadline = time.monotonic() + timeout_s
        while len(found) < _EVENTS_A_POLL:
            left_ms = max(0, int(1000 * (deadline - time.monotonic())))
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, left_ms)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    raise
                return found
            found += self._event(event)
        return found

    def _event(self, event: Any) -> list[Observation]:
        nvml = self._nvml
        pci = normal_pci(_text(self._pci_of(event.device)))
        xid = int(event.eventData)
        if event.eventType == nvml.nvmlEventTypeDoubleBitEccError:
            xid = 48
        elif event.eventType != nvml.nvmlEventTypeXidCriticalError:
            return []
        return [xid_event(Reading(pci=pci), xid, "nvml", self._catalogue, self._clock())]

    def _pci_of(self, handle: Any) -> str | bytes:
        info = self._ask("nvmlDeviceGetPciInfo", handle)
        return info.busId if info is not None else ""

    def _read(self, device: _Device) -> Reading:
        reading = Reading(
            pci=device.identity.pci, uuid=device.identity.uuid, serial=device.identity.serial
        )
        nvml = self._nvml
        try:
            reading.temp_c = self._ask("nvmlDeviceGetTemperature", device.handle, 0)
            power_mw = self._ask("nvmlDeviceGetPowerUsage", device.handle)
            reading.power_w = power_mw / 1000.0 if power_mw is not None else None
            # Volatile uncorrected errors: NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC.
            reading.ecc_uncorrected = self._ask("nvmlDeviceGetTotalEccErrors", device.handle, 1, 0)
            rows = self._ask("nvmlDeviceGetRemappedRows", device.handle)
            if rows is not None:
                reading.remap_pending, reading.remap_failure = bool(rows[2]), bool(rows[3])
            reading.throttles = self._throttles(device.handle)
            reading.recovery = self._recovery(device.handle)
            reading.nvlink_errors = self._nvlink(device)
            reading.fabric_degraded, reading.fabric_unhealthy = self._fabric(device.handle)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_RESET_REQUIRED:
                reading.reset_required = True
            elif self._is_lost(error):
                reading.lost = str(error)
            else:
                raise
        return reading

    def _gone(self) -> list[Reading]:
        """GPUs that NVML once knew and no longer lists: they do not vanish, they are lost."""
        here = {device.identity.uuid or device.identity.pci for device in self._devices}
        return [
            Reading(pci=identity.pci, uuid=identity.uuid, lost="NVML no longer lists it")
            for name, identity in self._known.items()
            if name not in here
        ]

    def _throttles(self, handle: Any) -> set[str]:
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if mask is None:
            mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return {word for bit, word in THROTTLE_BITS.items() if (mask or 0) & bit}

    def _recovery(self, handle: Any) -> str | None:
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        values = self._ask("nvmlDeviceGetFieldValues", handle, [field]) if field else None
        if not values or values[0].nvmlReturn != 0:
            return None
        code = int(values[0].value.uiVal)
        return RECOVERY_NAMES[code] if code < len(RECOVERY_NAMES) else str(code)

    def _nvlink(self, device: _Device) -> int | None:
        """Link errors since we came; asked less often, it takes many calls."""
        now = self._clock()
        if now - device.nvlink_at < _NVLINK_EVERY_S:
            return device.nvlink_new
        device.nvlink_at = now
        total = self._recoveries(device.handle)
        if total is not None:
            device.nvlink_base = total if device.nvlink_base is None else device.nvlink_base
            device.nvlink_new = max(0, total - device.nvlink_base)
        return device.nvlink_new

    def _recoveries(self, handle: Any) -> int | None:
        """How often its links had to recover; NVLink 5 counts that in fields of its own."""
        total: int | None = None
        for link in range(_NVLINKS):
            count = self._ask("nvmlDeviceGetNvLinkErrorCounter", handle, link, 1)
            if count is None:
                break
            total = (total or 0) + int(count)
        if total is not None:
            return total
        field = getattr(self._nvml, "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS", None)
        asked = [(field, link) for link in range(_NVLINKS)]
        values = self._ask("nvmlDeviceGetFieldValues", handle, asked) if field else None
        counts = [int(each.value.ullVal) for each in values or () if each.nvmlReturn == 0]
        return sum(counts) if counts else None

    def _fabric(self, handle: Any) -> tuple[bool | None, bool | None]:
        """Whether its part of the NVLink fabric has lost bandwidth, and whether a route is ill."""
        kind = getattr(self._nvml, "c_nvmlGpuFabricInfoV_t", None)
        if kind is None:
            return None, None
        info = kind()
        if self._ask("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info)) is None:
            return None, None
        return self._is_ill(info, "DEGRADED_BW"), self._is_ill(info, "ROUTE_UNHEALTHY")

    def _is_ill(self, info: Any, part: str) -> bool:
        shift, width, true = (
            int(getattr(self._nvml, f"NVML_GPU_FABRIC_HEALTH_MASK_{name}"))
            for name in (f"SHIFT_{part}", f"WIDTH_{part}", f"{part}_TRUE")
        )
        return int(info.healthMask) >> shift & width == true

    # errors ----------------------------------------------------------------------------------

    def _ask(self, function: str, *args: Any) -> Any:
        """The value, or None where the GPU, the driver or the module does not offer it."""
        nvml = self._nvml
        call = getattr(nvml, function, None)
        if call is None:
            return None
        try:
            return call(*args)
        except nvml.NVMLError as error:
            unknown = (
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_NOT_FOUND,
                nvml.NVML_ERROR_INVALID_ARGUMENT,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_NO_PERMISSION,
                nvml.NVML_ERROR_UNKNOWN,
            )
            if error.value in unknown:
                return None
            raise

    def _is_lost(self, error: Any) -> bool:
        nvml = self._nvml
        return error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)

    def _failed(self, error: Any) -> None:
        nvml = self._nvml
        what = str(error)
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            self.state = SourceState(self.name, "missing", f"no NVIDIA driver here: {what}")
        elif error.value == nvml.NVML_ERROR_NO_PERMISSION:
            fix = "give the agent access to /dev/nvidiactl and /dev/nvidia*"
            self.state = SourceState(self.name, "denied", f"{what}; {fix}")
        else:
            # A reloaded driver answers "uninitialized" until NVML is opened anew.
            self.state = SourceState(self.name, "failing", what)
        self.close()


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
