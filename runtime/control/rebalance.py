"""When measured shares say that the batch should be split another way. Pure, without a clock.

Only looks where power, a slow GPU or a slow host holds a replica back, or no longer does: what is
noise is none of its business.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.plan.batch import apportion

STEPS = 4
# A change that gains less is not worth its pause.
MIN_GAIN = 0.03
FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class NewSplit:
    """Samples per replica in the order of the last call; the longest share before and after."""

    samples: tuple[int, ...]
    before_s: float
    after_s: float


class Rebalance:
    """Collects shares of one generation while the caps stand still."""

    def __init__(self) -> None:
        self._seen: list[dict[int, float]] = []
        self._away = False
        self._not_before = 0.0
        self._wait_s = FIRST_WAIT_S
        self._skip = 1

    def generation_published(self) -> None:
        self.caps_moved()

    def caps_moved(self) -> None:
        """Shares of before say nothing any more; the step under way is a mixture."""
        self._seen.clear()
        self._skip = 1

    def observe(
        self,
        samples: Mapping[int, int],
        share_s: Mapping[int, float],
        *,
        restrained: bool,
        now: float,
    ) -> NewSplit | None:
        """Take one step's shares by replica; a better split when there is one that pays.

        Args:
            restrained: something is known to hold a replica back now.
        """
        if not restrained and not self._away:
            self._seen.clear()
            return None
        if self._skip > 0:
            self._skip -= 1
            return None
        self._seen.append(dict(share_s))
        if len(self._seen) < STEPS or now < self._not_before:
            return None
        del self._seen[:-STEPS]
        per_sample = {
            replica: statistics.median(step[replica] for step in self._seen) / count
            for replica, count in samples.items()
            if count
        }
        if len(per_sample) < 2 or min(per_sample.values()) <= 0.0:
            return None
        speeds = [
            1.0 / per_sample[replica] if replica in per_sample else 0.0 for replica in samples
        ]
        split = apportion(sum(samples.values()), speeds)
        before_s = max(per_sample[replica] * samples[replica] for replica in per_sample)
        after_s = max(
            per_sample[replica] * count
            for replica, count in zip(samples, split, strict=True)
            if count
        )
        if after_s > before_s * (1.0 - MIN_GAIN):
            return None
        return NewSplit(samples=split, before_s=before_s, after_s=after_s)

    def applied(self, now: float, *, restrained: bool) -> None:
        """The split is being changed: wait before the next one, longer each time."""
        self._away = restrained
        self._not_before = now + self._wait_s
        self._wait_s = min(2.0 * self._wait_s, LONGEST_WAIT_S)
