"""Which rank sends which units to whom when a generation's layout replaces the sources' layouts.

Every rank computes the whole plan from the `GenerationPlan` alone, so senders and receivers agree
without talking. A unit moves with all its rows and their optimizer state, once per rank that
lacks it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.config import ModelConfig
from runtime.errors import PlanError
from runtime.layout.sync import member_replicas
from runtime.layout.units import FAMILIES, Held, held_by_slot, unit_elements
from runtime.plan.generation import GenerationPlan

# Parameter, first and second moment.
TENSORS_PER_ELEMENT = 3


@dataclass(frozen=True, slots=True)
class Flow:
    """One message: world rank `src` sends the rows of `units` to world rank `dst`."""

    src: int
    dst: int
    units: Held


@dataclass(frozen=True, slots=True)
class MovePlan:
    """All messages, in the one order in which every rank posts them."""

    flows: tuple[Flow, ...]

    def num_units(self) -> int:
        """Units moved, counted once per receiver."""
        return sum(len(units) for flow in self.flows for units in flow.units.values())

    def num_bytes(self, model: ModelConfig, element_bytes: int = 4) -> int:
        """Bytes on the wire: parameters and both optimizer moments."""
        return sum(flow_elements(model, flow) for flow in self.flows) * element_bytes


def flow_elements(model: ModelConfig, flow: Flow) -> int:
    """Elements in the message, optimizer state included."""
    return TENSORS_PER_ELEMENT * sum(
        len(units) * unit_elements(model, family) for family, units in flow.units.items()
    )


def source_units(model: ModelConfig, plan: GenerationPlan) -> dict[str, Held]:
    """Units that every source holds, by GPU."""
    found: dict[str, Held] = {}
    for source in plan.sources:
        held = held_by_slot(model, source.holders, source.slots)
        found |= {gpu: held[slot] for gpu, slot in zip(source.gpus, source.slots, strict=True)}
    return found


def _missing(
    model: ModelConfig, plan: GenerationPlan, owned: dict[str, Held]
) -> dict[int, dict[str, list[int]]]:
    """Units that every rank needs and does not hold yet; ranks that lack nothing are left out."""
    lacking: dict[int, dict[str, list[int]]] = {}
    for base, replica in member_replicas(plan):
        needed = held_by_slot(model, replica.holders, replica.live)
        for position, slot in enumerate(replica.live):
            has = owned.get(replica.gpus[slot])
            if has == needed[slot]:
                continue
            units: dict[str, list[int]] = {}
            for family in FAMILIES:
                own = frozenset(has[family]) if has else frozenset()
                absent = [unit for unit in needed[slot][family] if unit not in own]
                if absent:
                    units[family] = absent
            if units:
                lacking[base + position] = units
    return lacking


def _candidates(
    lacking: dict[int, dict[str, list[int]]], owned: dict[int, Held], racks: Sequence[str]
) -> dict[tuple[str, int], dict[str, list[int]]]:
    """Ranks that hold each wanted unit, ascending, by rack."""
    wanted: dict[str, set[int]] = defaultdict(set)
    for families in lacking.values():
        for family, units in families.items():
            wanted[family].update(units)
    found: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank in sorted(owned):
        for family, absent in wanted.items():
            for unit in absent.intersection(owned[rank][family]):
                found[family, unit][racks[rank]].append(rank)
    return found


def move_plan(model: ModelConfig, plan: GenerationPlan) -> MovePlan:
    """Messages that take `plan.sources` to the layouts of `plan.replicas`.

    Each unit comes from the receiver's own rack when a source there holds it, otherwise from the
    holder that sends least so far. Without sources (a fresh run) nothing moves.

    Raises:
        PlanError: a needed unit that no member among the sources holds.
    """
    if not plan.sources:
        return MovePlan(())
    members = plan.members()
    rank_of = {gpu: rank for rank, gpu in enumerate(members)}
    racks = [gpu.rpartition("/")[0] for gpu in members]
    held = {gpu: units for gpu, units in source_units(model, plan).items() if gpu in rank_of}
    lacking = _missing(model, plan, held)
    if not lacking:
        return MovePlan(())
    holders = _candidates(lacking, {rank_of[gpu]: units for gpu, units in held.items()}, racks)
    size = {family: unit_elements(model, family) for family in FAMILIES}
    sent: dict[int, int] = defaultdict(int)
    flows: dict[tuple[int, int], dict[str, list[int]]] = {}
    for dst in sorted(lacking):
        for family, units in lacking[dst].items():
            for unit in units:
                able = holders.get((family, unit))
                if not able:
                    raise PlanError(
                        f"no member holds {family} unit {unit}; {members[dst]} needs it"
                    )
                near = able.get(racks[dst]) or [rank for ranks in able.values() for rank in ranks]
                src = min(near, key=lambda rank: (sent[rank], rank))
                sent[src] += size[family]
                flows.setdefault((src, dst), {}).setdefault(family, []).append(unit)
    # Both ends of a pair post in the same order, which backends with one channel a pair need.
    order = sorted(flows, key=lambda pair: (min(pair), max(pair), pair))
    return MovePlan(
        tuple(
            Flow(
                src,
                dst,
                {family: tuple(flows[src, dst].get(family, ())) for family in FAMILIES},
            )
            for src, dst in order
        )
    )
