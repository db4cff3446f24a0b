"""A GPU whose power nobody can read here: training goes on, numbers are NaN, and it says why."""

from __future__ import annotations

import math

from runtime.power.port import DeviceGone, PowerLimits, Reading


class AbsentGpu:
    """A `PowerBackend` that stands for a device which could not be opened.

    Args:
        why: with the fix. normal_w: nominal cap, so that planning has a number.
    """

    name = "absent"

    def __init__(self, why: str, normal_w: float) -> None:
        self.obstacle = why
        self._normal_w = normal_w

    def limits(self) -> PowerLimits:
        return PowerLimits(min_w=self._normal_w, normal_w=self._normal_w, max_w=self._normal_w)

    def read(self) -> Reading:
        nothing = math.nan
        return Reading(
            power_w=nothing, temp_c=nothing, clock_mhz=nothing, util=nothing, cap_w=self._normal_w
        )

    def set_cap(self, cap_w: float) -> None:
        raise DeviceGone(self.obstacle)

    def close(self) -> None:
        """Nothing was opened."""
