"""NVML's return codes as errors of the power port, each with what a person can do about it."""

from __future__ import annotations

import math
from typing import Any

from runtime.power.port import CapError, DeviceGone, NoPermission, NotSupported, PowerError


class GpuLost(DeviceGone):
    """The GPU has fallen off the bus, or was taken out."""


class ResetRequired(DeviceGone):
    """The GPU answers nothing until it is reset."""


class DriverAway(DeviceGone):
    """NVML or the driver is not there, is being reloaded, or does not match."""


class LibraryMissing(DriverAway):
    """libnvidia-ml is not installed."""


class DeviceBusy(PowerError):
    """The device or the driver did not answer in time; the next reading tries again."""


class LimitRefused(CapError):
    """NVML calls the value invalid although it is within the limits."""


# Constant of nvidia-ml-py -> (error, what happened and what to do about it).
_CODES: dict[str, tuple[type[PowerError], str]] = {
    "NVML_ERROR_UNINITIALIZED": (DriverAway, "NVML was shut down (the driver is being reloaded?)"),
    "NVML_ERROR_DRIVER_NOT_LOADED": (
        DriverAway,
        "the NVIDIA driver is not loaded; an administrator can run: sudo modprobe nvidia",
    ),
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": (
        DriverAway,
        "driver and NVML library are of different versions; reload the driver or reboot",
    ),
    "NVML_ERROR_LIBRARY_NOT_FOUND": (
        LibraryMissing,
        "libnvidia-ml.so.1 was not found; install the NVIDIA driver",
    ),
    "NVML_ERROR_GPU_IS_LOST": (
        GpuLost,
        "the GPU has fallen off the bus; drain the host and reboot it",
    ),
    "NVML_ERROR_NOT_FOUND": (GpuLost, "the GPU is no longer there"),
    "NVML_ERROR_GPU_NOT_FOUND": (GpuLost, "the GPU is no longer there"),
    "NVML_ERROR_RESET_REQUIRED": (
        ResetRequired,
        "the GPU needs a reset; when nothing runs on it, an administrator can run: "
        "sudo nvidia-smi --gpu-reset -i {index}",
    ),
    "NVML_ERROR_NO_PERMISSION": (
        NoPermission,
        "no permission to set its power limit; an administrator can run: {command}",
    ),
    "NVML_ERROR_NOT_SUPPORTED": (NotSupported, "not supported by this GPU"),
    "NVML_ERROR_FUNCTION_NOT_FOUND": (NotSupported, "not known to this driver"),
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH": (NotSupported, "not known to this driver"),
    "NVML_ERROR_INVALID_ARGUMENT": (LimitRefused, "NVML calls the value invalid"),
    "NVML_ERROR_INSUFFICIENT_POWER": (
        DeviceBusy,
        "the GPU's external power is not connected properly",
    ),
    "NVML_ERROR_TIMEOUT": (DeviceBusy, "the GPU did not answer in time"),
    "NVML_ERROR_IN_USE": (DeviceBusy, "the GPU is busy"),
    "NVML_ERROR_NOT_READY": (DeviceBusy, "the GPU is not ready yet"),
    "NVML_ERROR_IRQ_ISSUE": (DeviceBusy, "the kernel has trouble with the GPU's interrupts"),
    "NVML_ERROR_OPERATING_SYSTEM": (
        NoPermission,
        "the operating system blocked the request (a container?); on the host, an administrator "
        "can run: {command}",
    ),
}


def as_power_error(nvml: Any, error: Any, *, index: int, command: str) -> PowerError:
    """The typed error for an `NVMLError`.

    Args:
        nvml: the module the error came from. command: what sets the cap that was tried.
    """
    code = int(getattr(error, "value", -1))
    for name, (kind, words) in _CODES.items():
        if getattr(nvml, name, None) == code:
            return kind(f"GPU {index}: {words.format(index=index, command=command)}")
    return PowerError(f"GPU {index}: NVML error {code}: {error}")


def setting_command(index: int, cap_w: float, *, module: bool = False) -> str:
    """The command by which an administrator sets a cap."""
    watts = "WATTS" if math.isnan(cap_w) else f"{cap_w:.0f}"
    return f"sudo nvidia-smi -i {index} -pl {watts}" + (" -sc 1" if module else "")
