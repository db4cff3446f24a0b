"""The emulated device: pace, watts, degrees and clocks of a GPU that is not there.

Pace follows from the power cap, the temperature and injected slowness; the worker waits exactly
`share_s`, and the planner predicts with the same function. No clock: time comes in by `advance`.
"""

from __future__ import annotations

import math

import msgspec

from runtime.config import EmulatedConfig
from runtime.errors import PlanError
from runtime.power.curve import PAPER, Curve, curve_of
from runtime.power.port import CapOutOfRange, PowerLimits, Reading

# Clocks of the emulated part when busy at the normal cap, and when idle (figures like a B200's).
NORMAL_CLOCK_MHZ = 1665.0
IDLE_CLOCK_MHZ = 345.0
# Above throttle_c the device gives up this share of its pace and power per degree, down to a floor.
_THROTTLE_PER_C = 0.04
_THROTTLE_FLOOR = 0.4


def share_s(
    config: EmulatedConfig, work: float, num_samples: float, healthy_samples: float, speed: float
) -> float:
    """Seconds a slot's share of one step takes on a device of `speed`.

    Args:
        work: FLOPs a sample relative to a slot of a healthy replica (`runtime.layout.work`).
        num_samples: samples its replica computes this step.
        healthy_samples: samples a replica computes in the fully healthy run.
        speed: pace relative to a healthy device at its normal cap.

    Raises:
        PlanError: there is work to do and the speed is not above 0.
    """
    if work * num_samples == 0.0:
        return 0.0
    if not speed > 0.0:
        raise PlanError(f"a slot with work needs a speed above 0, not {speed!r}")
    return config.step_s * work * (num_samples / healthy_samples) / speed


def throttle(config: EmulatedConfig, temp_c: float) -> float:
    """Share of its pace that a device at `temp_c` keeps: 1 up to throttle_c, then softly less."""
    return max(_THROTTLE_FLOOR, 1.0 - _THROTTLE_PER_C * max(0.0, temp_c - config.throttle_c))


def steady_c(config: EmulatedConfig, power_w: float) -> float:
    """Temperature that a constant draw of `power_w` settles at."""
    return config.ambient_c + config.thermal_resistance_c_per_w * power_w


def sustained_w(config: EmulatedConfig) -> float:
    """Highest cap the device can hold for ever without throttling, within its limits."""
    if config.thermal_resistance_c_per_w <= 0.0:
        return config.max_cap_w
    cool_w = (config.throttle_c - config.ambient_c) / config.thermal_resistance_c_per_w
    return min(config.max_cap_w, max(config.min_cap_w, cool_w))


def speed_at(
    config: EmulatedConfig, cap_w: float, slowness: float = 1.0, curve: Curve = PAPER
) -> float:
    """Pace at `cap_w` below the throttle temperature; `slowness` 2.0 halves it."""
    return curve.perf(cap_w / config.normal_cap_w) / slowness


class EmulatedDevice:
    """State of one emulated GPU: cap, temperature and injected slowness. A `PowerBackend`."""

    name = "emulated"
    obstacle = ""

    def __init__(self, config: EmulatedConfig) -> None:
        self._config = config
        self._curve = curve_of(config.curve)
        self._cap_w = config.normal_cap_w
        self._slowness = 1.0
        self._temp_c = steady_c(config, config.idle_w)
        self._last = self._reading(0.0)

    @property
    def cap_w(self) -> float:
        return self._cap_w

    @property
    def temp_c(self) -> float:
        return self._temp_c

    @property
    def slowness(self) -> float:
        return self._slowness

    def limits(self) -> PowerLimits:
        config = self._config
        return PowerLimits(
            min_w=config.min_cap_w, normal_w=config.normal_cap_w, max_w=config.max_cap_w
        )

    def set_cap(self, cap_w: float) -> None:
        """Set the power cap.

        Raises:
            CapOutOfRange: outside the device's limits; the cap stands as it was.
        """
        low, high = self._config.min_cap_w, self._config.max_cap_w
        if not low <= cap_w <= high:
            raise CapOutOfRange(cap_w, low, high)
        self._cap_w = cap_w

    def set_slowness(self, factor: float) -> None:
        """Make the device `factor` times slower; 1.0 is none.

        Raises:
            PlanError: below 1 or not finite.
        """
        if not 1.0 <= factor < math.inf:
            raise PlanError(f"a slowness of {factor!r} is not possible; allowed: 1.0 or more")
        self._slowness = factor

    def speed(self) -> float:
        """Pace relative to a healthy device at its normal cap, throttling included."""
        return speed_at(self._config, self._cap_w, self._slowness, self._curve) * self._throttle()

    def advance(self, dt_s: float, utilisation: float) -> Reading:
        """Let `dt_s` seconds pass at `utilisation` (0 to 1) and return the reading at their end.

        First-order thermal model: the temperature approaches that of the present draw with the
        config's time constant, integrated exactly, so any step width gives the same curve.
        """
        util = min(1.0, max(0.0, utilisation))
        target_c = steady_c(self._config, self._power_w(util))
        tau_s = self._config.thermal_tau_s
        kept = math.exp(-max(0.0, dt_s) / tau_s) if tau_s > 0.0 else 0.0
        self._temp_c = target_c + (self._temp_c - target_c) * kept
        self._last = self._reading(util)
        return self._last

    def read(self) -> Reading:
        return msgspec.structs.replace(self._last, cap_w=self._cap_w)

    def close(self) -> None:
        """Nothing was opened."""

    def _throttle(self) -> float:
        return throttle(self._config, self._temp_c)

    def _power_w(self, util: float) -> float:
        """A busy device draws all that its cap allows; an idle one its idle power."""
        idle_w = min(self._config.idle_w, self._cap_w)
        return max(idle_w, idle_w + (self._cap_w * self._throttle() - idle_w) * util)

    def _reading(self, util: float) -> Reading:
        busy_mhz = max(IDLE_CLOCK_MHZ, NORMAL_CLOCK_MHZ * self.speed())
        return Reading(
            power_w=self._power_w(util),
            temp_c=self._temp_c,
            clock_mhz=IDLE_CLOCK_MHZ + (busy_mhz - IDLE_CLOCK_MHZ) * util,
            util=util,
            cap_w=self._cap_w,
            throttled=self._temp_c > self._config.throttle_c,
        )
