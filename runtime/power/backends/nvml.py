"""Power of one NVIDIA GPU through NVML (nvidia-ml-py), in watts; NVML itself counts milliwatts.

Setting needs root. Whether we may is probed when the device is opened, by setting the limit that
stands anyway, so that no boost is planned that would be refused. On Grace parts the limit of the
whole module governs (v2 calls). After a driver reload or a lost device every call tries anew.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

from runtime.power.backends.nvml_errors import GpuLost, as_power_error, setting_command
from runtime.power.port import (
    CapError,
    CapOutOfRange,
    DeviceGone,
    NoPermission,
    NotSupported,
    PowerError,
    PowerLimits,
    Reading,
)

T = TypeVar("T")
# NVML's nvmlPowerScopeType_t; nvidia-ml-py has no names for them.
GPU_SCOPE, MODULE_SCOPE = 0, 1
# Reasons for which a device slows down beyond what its own cap asks for.
_THROTTLE_NAMES = (
    "HwSlowdown",
    "HwThermalSlowdown",
    "SwThermalSlowdown",
    "HwPowerBrakeSlowdown",
)
_READ_ONLY = 'power.backend is "nvml_read_only": caps are read, never set'
_LOG = logging.getLogger(__name__)


class NvmlGpu:
    """One GPU as NVML numbers them. A `PowerBackend`.

    Args:
        nvml: the module `pynvml`, or one that speaks its interface.
        index: NVML index when it is opened; afterwards its UUID counts, so renumbering is harmless.
        normal_w: cap without boost; 0 takes the limit that is enforced now.
        read_only: never set anything, not even to probe.

    Raises:
        DeviceGone: no such device, or NVML cannot be used at all.
        NotSupported: the device has no power limit to read.
    """

    def __init__(
        self, nvml: Any, index: int, *, normal_w: float = 0.0, read_only: bool = False
    ) -> None:
        self._nvml = nvml
        self._index = index
        self._handle: Any = None
        self.uuid = ""
        self.name = "nvml_read_only" if read_only else "nvml"
        self._initialised = False
        self._scope = GPU_SCOPE
        self._open()
        self._scope = MODULE_SCOPE if self._module_limit_w() is not None else GPU_SCOPE
        found_w = self._limit_w()
        low_w, high_w = self._constraints_w()
        self._limits = PowerLimits(
            min_w=low_w, normal_w=min(high_w, max(low_w, normal_w or found_w)), max_w=high_w
        )
        self.obstacle = _READ_ONLY if read_only else self._probe(found_w)

    # the port --------------------------------------------------------------------------------

    def limits(self) -> PowerLimits:
        return self._limits

    def read(self) -> Reading:
        """A fresh reading; what the device does not know is NaN.

        Raises:
            DeviceGone: it does not answer.
        """
        nvml = self._nvml
        handle = self._present()
        clock = self._optional(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        temp = self._optional(
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        )
        util = self._optional(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0)
        return Reading(
            power_w=_nan(self._optional(self._draw_w)),
            temp_c=_nan(temp),
            clock_mhz=_nan(clock),
            util=_nan(util),
            cap_w=_nan(self._optional(self._limit_w)),
            throttled=bool(self._optional(self._is_throttled)),
        )

    def set_cap(self, cap_w: float) -> None:
        """Set the limit and read it back: one of NVML's setters swallows its own errors.

        Raises:
            CapOutOfRange, NoPermission, CapError: the limit stands as it was.
            DeviceGone: it does not answer.
        """
        if self.name == "nvml_read_only":
            raise NoPermission(_READ_ONLY)
        low_w, high_w = self._limits.min_w, self._limits.max_w
        if not low_w <= cap_w <= high_w:
            raise CapOutOfRange(cap_w, low_w, high_w)
        handle = self._present()
        limit_mw = round(cap_w * 1000)
        self._call(lambda: self._set(handle, limit_mw), cap_w)
        stands_w = self._requested_w()
        if abs(stands_w - cap_w) > 1.0:
            raise CapError(
                f"GPU {self._index} keeps a power limit of {stands_w:g} W where {cap_w:g} W was "
                f"set; an administrator can try: {self._command(cap_w)}"
            )

    def close(self) -> None:
        self._handle = None
        if self._initialised:
            self._initialised = False
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError as error:
                _LOG.debug("nvmlShutdown: %s", error)

    # opening ---------------------------------------------------------------------------------

    def _open(self) -> None:
        """Get a handle: by index the first time, by UUID afterwards."""
        nvml = self._nvml
        if not self._initialised:
            self._call(nvml.nvmlInit)
            self._initialised = True
        if self.uuid:
            self._handle = self._call(lambda: nvml.nvmlDeviceGetHandleByUUID(self.uuid))
            return
        try:
            self._handle = self._call(lambda: nvml.nvmlDeviceGetHandleByIndex(self._index))
        except CapError as error:
            num = self._call(nvml.nvmlDeviceGetCount)
            raise GpuLost(f"there is no GPU {self._index}; NVML sees {num}") from error
        self.uuid = _text(self._call(lambda: nvml.nvmlDeviceGetUUID(self._handle)))

    def _present(self) -> Any:
        """The handle; gets a new one after the device or its driver was away."""
        if self._handle is None:
            self._open()
            index = self._optional(lambda: self._nvml.nvmlDeviceGetIndex(self._handle))
            self._index = self._index if index is None else int(index)
        return self._handle

    def _probe(self, found_w: float) -> str:
        """Why limits cannot be set, "" if they can; the limit stands as it was found."""
        try:
            self._call(
                lambda: self._nvml.nvmlDeviceSetPowerManagementLimit(
                    self._handle, round(self._gpu_limit_w() * 1000)
                ),
                found_w,
            )
        except NotSupported:
            return self._probe_module(found_w) if self._scope == MODULE_SCOPE else _unsettable()
        except PowerError as error:
            return str(error)
        return self._probe_module(found_w) if self._scope == MODULE_SCOPE else ""

    def _probe_module(self, found_w: float) -> str:
        """The module's setter reports nothing: a watt is taken away, looked for and given back."""
        low_w, high_w = self._constraints_w()
        tried_w = found_w - 1.0 if found_w - 1.0 >= low_w else found_w + 1.0
        if not low_w <= tried_w <= high_w:
            return _unsettable()
        handle = self._handle
        try:
            self._call(lambda: self._set(handle, round(tried_w * 1000)), tried_w)
            taken = abs(self._requested_w() - tried_w) < 0.5
            self._call(lambda: self._set(handle, round(found_w * 1000)), found_w)
        except PowerError as error:
            return str(error)
        return "" if taken else str(NoPermission(self._refusal(found_w)))

    # what is read and set --------------------------------------------------------------------

    def _set(self, handle: Any, limit_mw: int) -> None:
        if self._scope == MODULE_SCOPE:
            self._nvml.nvmlDeviceSetPowerManagementLimit_v2(handle, MODULE_SCOPE, limit_mw)
        else:
            self._nvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw)

    def _constraints_w(self) -> tuple[float, float]:
        nvml = self._nvml
        if self._scope == MODULE_SCOPE:
            low = self._field_w(nvml.NVML_FI_DEV_POWER_MIN_LIMIT)
            high = self._field_w(nvml.NVML_FI_DEV_POWER_MAX_LIMIT)
            if low is not None and high is not None:
                return low, high
            raise NotSupported(f"GPU {self._index} does not tell the limits of its module")
        low_mw, high_mw = self._call(
            lambda: nvml.nvmlDeviceGetPowerManagementLimitConstraints(self._handle)
        )
        return low_mw / 1000.0, high_mw / 1000.0

    def _limit_w(self) -> float:
        """The limit that is enforced, whoever set it."""
        module_w = self._module_limit_w() if self._scope == MODULE_SCOPE else None
        return self._gpu_limit_w() if module_w is None else module_w

    def _requested_w(self) -> float:
        """The limit that was set last: what is enforced may be lower for other reasons."""
        nvml = self._nvml
        if self._scope == MODULE_SCOPE:
            asked_w = self._field_w(nvml.NVML_FI_DEV_POWER_REQUESTED_LIMIT)
            return self._limit_w() if asked_w is None else asked_w
        limit_mw = self._call(lambda: nvml.nvmlDeviceGetPowerManagementLimit(self._handle))
        return float(limit_mw) / 1000.0

    def _gpu_limit_w(self) -> float:
        nvml, handle = self._nvml, self._handle
        return float(self._call(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))) / 1000.0

    def _module_limit_w(self) -> float | None:
        return self._field_w(self._nvml.NVML_FI_DEV_POWER_CURRENT_LIMIT)

    def _draw_w(self) -> float:
        nvml, handle = self._nvml, self._handle
        if self._scope == MODULE_SCOPE:
            module_w = self._field_w(nvml.NVML_FI_DEV_POWER_INSTANT)
            if module_w is not None:
                return module_w
        return float(self._call(lambda: nvml.nvmlDeviceGetPowerUsage(handle))) / 1000.0

    def _field_w(self, field: int) -> float | None:
        """A power field of the module, None where the part has no module scope."""
        nvml, handle = self._nvml, self._handle
        try:
            value = self._call(
                lambda: nvml.nvmlDeviceGetFieldValues(handle, [(field, MODULE_SCOPE)])
            )[0]
        except (NotSupported, CapError):
            return None
        if value.nvmlReturn != nvml.NVML_SUCCESS or value.value.uiVal == 0:
            return None
        return float(value.value.uiVal) / 1000.0

    def _is_throttled(self) -> bool:
        nvml, handle = self._nvml, self._handle
        try:
            reasons = self._call(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        except NotSupported:  # An older driver knows the call by its former name only.
            reasons = self._call(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        mask = 0
        for name in _THROTTLE_NAMES:
            mask |= int(getattr(nvml, f"nvmlClocksThrottleReason{name}", 0))
        return bool(int(reasons) & mask)

    # calling ---------------------------------------------------------------------------------

    def _call(self, do: Callable[[], T], cap_w: float = math.nan) -> T:
        """Call NVML; its errors come out typed. A device that is gone loses its handle."""
        try:
            return do()
        except self._nvml.NVMLError as error:
            typed = as_power_error(
                self._nvml, error, index=self._index, command=self._command(cap_w)
            )
            if isinstance(typed, DeviceGone):
                self.close()
            raise typed from error

    def _optional(self, do: Callable[[], T]) -> T | None:
        """What the device says, None where it does not know.

        Raises:
            DeviceGone: it does not answer.
        """
        try:
            return self._call(do)
        except DeviceGone:
            raise
        except PowerError:
            return None

    def _command(self, cap_w: float) -> str:
        return setting_command(self._index, cap_w, module=self._scope == MODULE_SCOPE)

    def _refusal(self, cap_w: float) -> str:
        return (
            f"no permission to set the power limit of GPU {self._index}; "
            f"an administrator can run: {self._command(cap_w)}"
        )


def _unsettable() -> str:
    return "this GPU's power limit cannot be set"


def _nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
