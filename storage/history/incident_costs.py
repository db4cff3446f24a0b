"""What an incident cost, part by part, and what its alternatives would have cost. Pure.

Costs are GPU-hours of the whole run: wall time that the goodput ledger does not count as
productive, times the run's GPUs. While several incidents are open they share the loss equally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from storage.history.incidents import PARTS, Incident, Part, is_whole
from storage.records import GenerationFormed, LedgerSpent, Option, Proposal

LOST = (
    "degraded",
    "detecting",
    "reconfiguring",
    "recomputing",
    "waiting_for_approval",
    "paused",
)
# Steps are recorded as their productive time, then what they took beyond it
EXCESS = ("degraded", "waiting_for_approval")
MIN_STEPS = 3
Shape = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What one generation committed. step_s: the sum over its steps."""

    num_steps: int
    tokens: int
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class PartCost:
    part: Part
    wall_s: float
    gpu_hours: float


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way the incident could have gone. goodput: while it would have stood. basis: where
    the numbers are from."""

    title: str
    goodput: float | None
    gpu_hours: float
    basis: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    parts: tuple[PartCost, ...]
    gpu_hours: float
    alternatives: tuple[Alternative, ...]


class LossCurve:
    """Lost wall seconds of a run up to any moment, from its ledger."""

    def __init__(self, intervals: Sequence[LedgerSpent]) -> None:
        at: list[float] = [0.0]
        lost: list[float] = [0.0]
        spans = sorted(intervals, key=lambda one: one.begin)
        index = 0
        while index < len(spans):
            one = spans[index]
            end, loss = one.end, (one.end - one.begin) if one.bucket in LOST else 0.0
            following = spans[index + 1] if index + 1 < len(spans) else None
            if one.bucket == "productive" and following and following.bucket in EXCESS:
                end, loss = following.end, following.end - following.begin
                index += 1
            at += [one.begin, end]
            lost += [lost[-1], lost[-1] + loss]
            index += 1
        self._at = np.array(at)
        self._lost = np.array(lost)

    def between(self, begin: float, end: float) -> float:
        """Lost seconds in [begin, end)."""
        values: npt.NDArray[np.float64] = np.interp([begin, end], self._at, self._lost)
        return float(values[1] - values[0])


def costs_of(
    incidents: Sequence[Incident],
    generations: Sequence[GenerationFormed],
    proposals: Sequence[Proposal],
    intervals: Sequence[LedgerSpent],
    paces: Mapping[int, Pace],
    until: float,
) -> dict[str, Cost]:
    """Incident id -> its cost. paces: by generation, as measured."""
    curve = LossCurve(intervals)
    num_gpus = max((sum(len(one.gpus) for one in form.replicas) for form in generations), default=0)
    by_id = {one.id: one for one in proposals}
    spans = [(one.begin, until if one.end is None else one.end) for one in incidents]
    costs = {}
    for incident, (begin, end) in zip(incidents, spans, strict=True):
        parts = []
        for part in PARTS:
            own = [one for one in incident.stretches if one.part == part]
            if not own:
                continue
            lost_s = sum(_shared(curve, one.begin, one.end, spans) for one in own)
            wall_s = sum(one.end - one.begin for one in own)
            parts.append(PartCost(part=part, wall_s=wall_s, gpu_hours=lost_s * num_gpus / 3600))
        total = sum(one.gpu_hours for one in parts)
        judge = _Judge(generations, paces, num_gpus)
        chosen = [by_id[one] for one in incident.proposals if one in by_id]
        others = judge.alternatives(incident, parts, chosen, curve, begin, end)
        costs[incident.id] = Cost(parts=tuple(parts), gpu_hours=total, alternatives=others)
    return costs


def _shared(
    curve: LossCurve, begin: float, end: float, spans: Sequence[tuple[float, float]]
) -> float:
    edges = {begin, end} | {at for span in spans for at in span if begin < at < end}
    cuts = sorted(edges)
    lost = 0.0
    for left, right in pairwise(cuts):
        middle = (left + right) / 2
        lost += curve.between(left, right) / max(1, sum(a <= middle < b for a, b in spans))
    return lost


class _Judge:
    """Prices alternatives by what this run measured in each shape; by prediction where it never
    had that shape."""

    def __init__(
        self, generations: Sequence[GenerationFormed], paces: Mapping[int, Pace], num_gpus: int
    ) -> None:
        self._num_gpus = num_gpus
        self._measured: dict[tuple[Shape, bool], tuple[float, str]] = {}
        self._healthy = 0.0
        for form in generations:
            pace = paces.get(form.generation)
            if pace is None or pace.num_steps < MIN_STEPS:
                continue
            shape = tuple(one.live if one.mode == "training" else () for one in form.replicas)
            basis = f"measured in generation {form.generation} ({pace.num_steps} steps)"
            boosted = any(one.boost_w > 0 for one in form.replicas)
            self._measured[shape, boosted] = (pace.tokens_per_s, basis)
            if all(map(is_whole, form.replicas)):
                self._healthy = max(self._healthy, pace.tokens_per_s)

    def alternatives(
        self,
        incident: Incident,
        parts: Sequence[PartCost],
        proposals: Sequence[Proposal],
        curve: LossCurve,
        begin: float,
        end: float,
    ) -> tuple[Alternative, ...]:
        if not proposals:
            return ()
        first = proposals[0]
        # Until it was proposed nothing could be chosen: the same for every alternative
        common_s = curve.between(begin, min(first.created_at, end))
        rest_s = max(0.0, end - first.created_at)
        found = []
        for option in first.options:
            if not option.feasible:
                continue
            goodput, basis = self._goodput(option)
            pause_s = min(option.cost_s, rest_s)
            lost_s = common_s + pause_s + (rest_s - pause_s) * (1 - goodput)
            found.append(
                Alternative(
                    title=option.title.partition(": ")[0],
                    goodput=goodput,
                    gpu_hours=lost_s * self._num_gpus / 3600,
                    basis=basis,
                )
            )
        return tuple(found) + self._at_once(incident, parts, proposals)

    def _at_once(
        self, incident: Incident, parts: Sequence[PartCost], proposals: Sequence[Proposal]
    ) -> tuple[Alternative, ...]:
        """The same decision without the wait for it."""
        waited = next((one for one in parts if one.part == "waited"), None)
        approved = [one for one in proposals if one.chosen is not None]
        if waited is None or not approved:
            return ()
        option = approved[0].options[approved[0].chosen or 0]
        goodput, basis = self._goodput(option)
        instead = waited.wall_s * (1 - goodput) * self._num_gpus / 3600
        total = sum(one.gpu_hours for one in parts)
        return (
            Alternative(
                title="What was done, decided at once",
                goodput=goodput,
                gpu_hours=max(0.0, total - waited.gpu_hours + min(instead, waited.gpu_hours)),
                basis=basis,
            ),
        )

    def _goodput(self, option: Option) -> tuple[float, str]:
        measured = self._measured.get((option.shape, bool(option.caps_w)))
        if measured is not None and self._healthy > 0:
            return min(1.0, measured[0] / self._healthy), measured[1]
        return option.goodput, "predicted by the planner"
