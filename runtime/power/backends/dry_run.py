"""Sets nothing: writes down and logs what it would set. Readings come from the device behind it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import msgspec

from runtime.power.port import CapOutOfRange, PowerBackend, PowerLimits, Reading

KEPT = 1000
_LOG = logging.getLogger(__name__)


class DryRun:
    """A `PowerBackend` before another one, which is only read.

    Args:
        gpu: GPU id, for the log. inner: the device that is read.
        say: told in a line what would be set.
    """

    name = "dry_run"
    obstacle = ""

    def __init__(
        self, gpu: str, inner: PowerBackend, say: Callable[[str], None] | None = None
    ) -> None:
        self._gpu = gpu
        self._inner = inner
        self._say = say or (lambda line: _LOG.info("%s", line))
        self._cap_w: float | None = None
        # (from, to) in watts, newest last.
        self.would_set: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def limits(self) -> PowerLimits:
        return self._inner.limits()

    def read(self) -> Reading:
        """The device's reading, with the cap that would stand had it been set."""
        reading = self._inner.read()
        if self._cap_w is None:
            return reading
        return msgspec.structs.replace(reading, cap_w=self._cap_w)

    def set_cap(self, cap_w: float) -> None:
        """Write down a cap.

        Raises:
            CapOutOfRange: the device would refuse it.
        """
        limits = self._inner.limits()
        if not limits.min_w <= cap_w <= limits.max_w:
            raise CapOutOfRange(cap_w, limits.min_w, limits.max_w)
        before_w = self.read().cap_w
        self._cap_w = cap_w
        self.would_set.append((before_w, cap_w))
        self._say(f"dry run: {self._gpu} would go from {before_w:g} W to {cap_w:g} W")

    def close(self) -> None:
        self._inner.close()
