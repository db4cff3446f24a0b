"""Goodput of a run against what dropping whole replicas would have given. Pure.

The peer drops a replica for as long as one of its slots is dead. It is granted the same pauses and
the run's own healthy pace, so the difference is what nonuniform tensor parallelism brought.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.history.incident_costs import MIN_STEPS, Pace
from storage.history.incidents import is_whole
from storage.records import GenerationFormed


@dataclass(frozen=True, kw_only=True)
class AgainstDrop:
    """Token goodput over the time in which generations stood, 0 to 1. basis: where the healthy pace
    is from."""

    actual: float
    dropped: float
    healthy_tokens_per_s: float
    basis: str


def against_drop(
    generations: Sequence[GenerationFormed], paces: Mapping[int, Pace], end: float
) -> AgainstDrop | None:
    """None where the run never trained whole for `MIN_STEPS` steps: no healthy pace is known."""
    whole = [form for form in generations if all(map(is_whole, form.replicas))]
    measured = [paces[form.generation] for form in whole if form.generation in paces]
    steps, step_s = sum(one.num_steps for one in measured), sum(one.step_s for one in measured)
    if steps < MIN_STEPS or step_s <= 0 or not generations:
        return None
    healthy = sum(one.tokens for one in measured) / step_s
    wall_s = max(0.0, end - generations[0].at)
    if wall_s <= 0:
        return None
    actual = dropped = 0.0
    for form in generations:
        pace = paces.get(form.generation)
        if pace is None:
            continue
        share = sum(map(is_whole, form.replicas)) / max(1, len(form.replicas))
        actual += pace.tokens
        dropped += healthy * share * pace.step_s
    possible = healthy * wall_s
    return AgainstDrop(
        actual=min(1.0, actual / possible),
        dropped=min(1.0, dropped / possible),
        healthy_tokens_per_s=healthy,
        basis=f"healthy pace measured over {steps} steps with every slot live",
    )
