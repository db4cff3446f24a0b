"""How long something took where it ran: on the host, or on the device's stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Seconds of one block of work.

    streamed: the work is queued on a device stream and the host runs ahead of it, so events mark
        its begin and end; `seconds` may then be read only once the host has waited for the stream.
    """

    def __init__(self, *, streamed: bool) -> None:
        self._events = (
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) if streamed else ()
        )
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the block; what raised is not measured."""
        if self._events:
            self._events[0].record()
        began = time.perf_counter()
        yield
        self._seconds = time.perf_counter() - began
        if self._events:
            self._events[1].record()

    @property
    def seconds(self) -> float:
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1])) / 1e3
        return self._seconds
