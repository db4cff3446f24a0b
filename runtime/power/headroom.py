"""How many more failures a rack's watts can make up for. Pure arithmetic over a power plan."""

from __future__ import annotations

from collections.abc import Callable

from runtime.errors import PlanError
from runtime.power.governor import RackPower, plan_caps

# A replica within this of the healthy pace keeps up: whole heads and blocks never split evenly.
_KEEPS_UP = 0.98


def boostable_failures(
    lose: Callable[[int], RackPower | None], most: int, target_pace: float = 1.0
) -> int:
    """Failures in a row after which a boost still brings the rack to the healthy pace.

    Args:
        lose: the rack after so many more failures, None when that leaves nothing to train on.
        most: live slots now.
    """
    for more in range(1, most + 1):
        rack = lose(more)
        if rack is None:
            return more - 1
        try:
            plan = plan_caps(rack, target_pace)
        except PlanError:
            return more - 1
        if plan.pace < target_pace * _KEEPS_UP:
            return more - 1
    return most
