"""The port to a GPU's power: what a backend reads and sets, whatever device is behind it.

`runtime.power.emulated.EmulatedDevice` is a leaf; an NVML leaf goes into runtime/power/backends/.
Only the agent and the worker open a backend.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from runtime.errors import CounterpoiseError


class CapError(CounterpoiseError):
    """A power cap that the device does not take; says the value, the limits and the fix."""


class PowerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a device allows, in watts. normal_w: its cap when nothing is boosted."""

    min_w: float
    normal_w: float
    max_w: float


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a device. util: share of the time it was busy since the last look, 0 to 1."""

    power_w: float
    temp_c: float
    clock_mhz: float
    util: float
    cap_w: float


class PowerBackend(Protocol):
    """Power of one GPU."""

    def limits(self) -> PowerLimits:
        """Limits of the device; they do not change while it is open."""

    def read(self) -> Reading:
        """Newest reading."""

    def set_cap(self, cap_w: float) -> None:
        """Cap the device's power.

        Raises:
            CapError: outside the limits, or not permitted; nothing has changed.
        """
