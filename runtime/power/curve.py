"""How fast a GPU runs at a power cap: the fitted curve of the NTP paper and its inverse.

Everything is relative: power to the normal cap, pace to the pace at the normal cap. Governor, cost
model and emulated device use this one curve unless the config names a measured one (`Curve`), so a
prediction and an emulated run agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from runtime.errors import PlanError

# Slope of the fitted curve at the normal cap; the exponent below it, so that the two meet smoothly.
_SLOPE = 0.765
# The fitted cubic peaks here (its derivative 0.765 - 1.37 q - 1.35 q^2 is 0 at q = 0.400).
PEAK_RATIO = 1.4
_BISECTIONS = 60


def perf(power_ratio: float) -> float:
    """Pace at `power_ratio` times the normal cap, relative to the pace at the normal cap.

    Above 1 it is FACTS 4's fit to the paper, p * (1 - 0.235 (p-1) - 0.45 (p-1)^2), held constant
    beyond its peak at 1.4: a higher cap never slows a GPU down. Below 1 that cubic turns convex
    (at p = 0.49), so the continuation is p^0.765: monotone, concave, same value and slope at 1.
    """
    if power_ratio <= 0.0:
        return 0.0
    if power_ratio < 1.0:
        return float(power_ratio**_SLOPE)
    ratio = min(power_ratio, PEAK_RATIO)
    above = ratio - 1.0
    return ratio * (1.0 - 0.235 * above - 0.45 * above * above)


PEAK_PERF = perf(PEAK_RATIO)


def power_for(pace: float) -> float:
    """Least power ratio at which `perf` reaches `pace`: the inverse, never a hair too little.

    Raises:
        PlanError: `pace` is above what any power reaches (1.168 of the normal pace).
    """
    if pace <= 0.0:
        return 0.0
    if pace > PEAK_PERF:
        raise PlanError(
            f"pace {pace:.3f} is out of reach; no power cap brings more than {PEAK_PERF:.3f}"
        )
    if pace == 1.0:
        return 1.0
    low, high = 0.0, PEAK_RATIO
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        if perf(middle) >= pace:
            high = middle
        else:
            low = middle
    return high


class Curve:
    """A pace-over-power curve: the paper's fit, or points measured on real devices.

    Between measured points pace is linear in power, below the lowest it follows the power law of
    `perf` through that point, above the highest it stays constant: nothing is promised that was
    not seen.

    Args:
        points: (power ratio, pace) relative to the normal cap and the pace there, by power; ()
            means the paper's fit.

    Raises:
        PlanError: fewer than two points, or points that do not rise.
    """

    def __init__(self, points: Sequence[Sequence[float]] = ()) -> None:
        self.points = tuple((float(ratio), float(pace)) for ratio, pace in points)
        if not self.points:
            self.peak_ratio, self.peak = PEAK_RATIO, PEAK_PERF
            return
        check_points(self.points)
        self.peak_ratio, self.peak = self.points[-1]

    def perf(self, power_ratio: float) -> float:
        """Pace at `power_ratio` times the normal cap, relative to the pace at the normal cap."""
        if not self.points:
            return perf(power_ratio)
        if power_ratio <= 0.0:
            return 0.0
        low_ratio, low_pace = self.points[0]
        if power_ratio < low_ratio:
            return low_pace * float((power_ratio / low_ratio) ** _SLOPE)
        for (ratio, pace), (above_ratio, above_pace) in pairwise(self.points):
            if power_ratio <= above_ratio:
                share = (power_ratio - ratio) / (above_ratio - ratio)
                return pace + share * (above_pace - pace)
        return self.peak

    def power_for(self, pace: float) -> float:
        """Least power ratio that brings `pace`, never a hair too little.

        Raises:
            PlanError: `pace` is above what any power reaches.
        """
        if not self.points:
            return power_for(pace)
        if pace <= 0.0:
            return 0.0
        if pace > self.peak:
            raise PlanError(
                f"pace {pace:.3f} is out of reach; no power cap brings more than {self.peak:.3f}"
            )
        low, high = 0.0, self.peak_ratio
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2.0
            if self.perf(middle) >= pace:
                high = middle
            else:
                low = middle
        return high


def check_points(points: Sequence[tuple[float, float]]) -> None:
    """Refuse points that are no curve.

    Raises:
        PlanError: fewer than two, not finite, not above 0, not rising in both columns.
    """
    if len(points) < 2:
        raise PlanError(f"a curve needs two points or more, not {len(points)}")
    if any(not (0.0 < value < math.inf) for point in points for value in point):
        raise PlanError(f"a curve's power ratios and paces must be finite and above 0: {points!r}")
    for (ratio, pace), (above_ratio, above_pace) in pairwise(points):
        if not (above_ratio > ratio and above_pace >= pace):
            raise PlanError(
                f"a curve must rise: {above_pace:g} at {above_ratio:g} follows "
                f"{pace:g} at {ratio:g}"
            )


PAPER = Curve()


@lru_cache(maxsize=16)
def curve_of(points: tuple[tuple[float, float], ...]) -> Curve:
    """The curve of a config's points; () is the paper's fit."""
    return Curve(points) if points else PAPER
