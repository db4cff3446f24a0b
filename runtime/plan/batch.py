"""The batch plan: how many samples of every step each replica takes.

Minimises the time of the slowest replica exactly, in whole samples. Knows speeds only, not why a
replica is slow.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from runtime.errors import PlanError


def apportion(global_batch: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Whole samples per replica so that the slowest replica is done as early as possible.

    Giving every next sample to the replica that would be done with it first is optimal for the
    makespan. All but a few samples a replica are surely within the optimum, so they are handed out
    at once: O(n log n) for n replicas, whatever the batch.

    Args:
        global_batch: samples of a step.
        speeds: samples per second of every replica, in any common unit; 0 takes no sample.

    Returns:
        Samples per replica, adding up to `global_batch`. Ties go to the lower index.

    Raises:
        PlanError: a speed is negative or not finite, or no replica has any speed.
    """
    if any(not 0.0 <= speed < math.inf for speed in speeds):
        raise PlanError(f"speeds must be finite and not negative: {list(speeds)!r}")
    samples = [0] * len(speeds)
    if global_batch == 0:
        return tuple(samples)
    total = math.fsum(speeds)
    if not total > 0.0:
        raise PlanError("no replica can train: every speed is 0")
    for index, speed in enumerate(speeds):
        # One less than the fair share, so that rounding can never hand out a sample too many.
        samples[index] = max(0, math.floor(global_batch * (speed / total)) - 1)
    queue = [
        ((samples[index] + 1) / speed, index) for index, speed in enumerate(speeds) if speed > 0.0
    ]
    heapq.heapify(queue)
    for _ in range(global_batch - sum(samples)):
        _, index = queue[0]
        samples[index] += 1
        heapq.heapreplace(queue, ((samples[index] + 1) / speeds[index], index))
    return tuple(samples)


def makespan(samples: Sequence[int], speeds: Sequence[float]) -> float:
    """Time of the slowest replica for `samples`, in the unit of 1 / speed."""
    return max(
        (count / speed for count, speed in zip(samples, speeds, strict=True) if count), default=0.0
    )
