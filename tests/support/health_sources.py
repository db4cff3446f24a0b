"""What tests of health sources share: a catalogue, a line, and waiting for what is seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from runtime.health.catalogue import load_catalogue
from runtime.health.observation import Observation
from runtime.health.sources.port import HealthSource

CATALOGUE = load_catalogue()
XID = "[ 1.0] NVRM: Xid (PCI:0000:9b:00): 79, pid=1, GPU has fallen off the bus.\n"


def soon(
    source: HealthSource, wanted: Callable[[Sequence[Observation]], bool], deadline_s: float = 5.0
) -> list[Observation]:
    """Polls until `wanted` holds of all that was seen."""
    seen: list[Observation] = []
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        seen += source.poll(0.05)
        if wanted(seen):
            return seen
    raise AssertionError(f"not seen within {deadline_s} s; seen: {seen}, {source.state}")
