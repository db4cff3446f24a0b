"""The port to a GPU's power: what a backend reads and sets, whatever device is behind it.

Leaves: `runtime.power.emulated.EmulatedDevice`, and those in runtime/power/backends/. Only the
agent and `counterpoise power calibrate` open one. Watts, degrees Celsius, MHz.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from runtime.errors import CounterpoiseError


class PowerError(CounterpoiseError):
    """A device that does not do what was asked; the message says the fix."""


class DeviceGone(PowerError):
    """The device does not answer at all: lost, removed, or its driver is not loaded."""


class NotSupported(PowerError):
    """The device answers, but knows no such reading or setting."""


class CapError(PowerError):
    """A power cap that the device does not take; nothing has changed."""


class CapOutOfRange(CapError):
    """A cap outside the device's limits."""

    def __init__(self, cap_w: float, low_w: float, high_w: float) -> None:
        super().__init__(
            f"a power cap of {cap_w:g} W is outside the device's limits; "
            f"choose {low_w:g} to {high_w:g} W"
        )


class NoPermission(CapError):
    """Setting a cap needs rights we lack; the message has the command an administrator runs."""


class PowerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a device allows, in watts. normal_w: its cap when nothing is boosted."""

    min_w: float
    normal_w: float
    max_w: float


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a device. util: share of the time it was busy since the last look, 0 to 1.

    throttled: it slows itself down for heat or for its power supply, beyond what its cap asks.
    """

    power_w: float
    temp_c: float
    clock_mhz: float
    util: float
    cap_w: float
    throttled: bool = False


class PowerBackend(Protocol):
    """Power of one GPU. Every method raises `DeviceGone` when the device does not answer."""

    @property
    def name(self) -> str:
        """Which backend this is, as in the config and on screen: "emulated", "nvml", ..."""

    @property
    def obstacle(self) -> str:
        """Why caps cannot be set here, with the fix; "" when they can. Known once it is open, so
        that nobody plans on a boost that will be refused."""

    def limits(self) -> PowerLimits:
        """Limits of the device; they do not change while it is open."""

    def read(self) -> Reading:
        """A fresh reading; `cap_w` is what the device enforces now, whoever set it."""

    def set_cap(self, cap_w: float) -> None:
        """Cap the device's power.

        Raises:
            CapError: outside the limits, or not permitted; nothing has changed.
        """

    def close(self) -> None:
        """Let go of the device; caps stay as they are."""
