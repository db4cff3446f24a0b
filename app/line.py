"""Which generations make up a run's line: one that went back to a checkpoint left some. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from storage.records import GenerationFormed


def on_the_line(generations: Sequence[GenerationFormed]) -> list[GenerationFormed]:
    """Without those that lost all their steps: a later one began at or before their first."""
    kept: list[GenerationFormed] = []
    for one in reversed(generations):
        if not kept or one.first_step < kept[-1].first_step:
            kept.append(one)
    return kept[::-1]
