"""How fast a GPU runs at a power cap: the fitted curve of the NTP paper and its inverse.

Everything is relative: power to the normal cap, pace to the pace at the normal cap. Governor, cost
model and emulated device all use this one curve, so a prediction and an emulated run agree.
"""

from __future__ import annotations

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
