"""Which rank hands which gradient rows to whom (the `reshard` strategy of the NTP paper).

The smallest training replica sets the job-wide reduced degree and, with its layout, the positions
that units are summed at. In every replica one core slot stands for each position: the other slots
hand it their rows, the core slots of all replicas reduce, and the sums go back the way the rows
came (arXiv 2504.06095). Several holders of a unit in one replica are summed by its core slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.config import ModelConfig
from runtime.errors import PlanError
from runtime.layout.move import Flow
from runtime.layout.sync import SyncGroup, member_replicas, rank_tables
from runtime.layout.units import FAMILIES, Held, first_turn, parameters, unit_elements
from runtime.plan.generation import GenerationPlan, ReplicaPlan

Positions = dict[str, npt.NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """degree: the job-wide reduced degree.

    groups: core slots of all replicas by position, with the units they sum; norms, which every
        rank holds, come last and are summed over the world as they are.
    handovers: rows that leave a holder for the core slot of its own replica and come back summed.
    """

    degree: int
    groups: tuple[SyncGroup, ...]
    handovers: tuple[Flow, ...]

    @property
    def norms(self) -> SyncGroup:
        return self.groups[-1]


@dataclass(frozen=True, slots=True)
class Stage:
    """Parameters whose rows travel in one exchange per replica and one reduction per position.

    ready: position in backward order of the last of them.
    """

    numbers: tuple[int, ...]
    ready: int


def reshard_plan(model: ModelConfig, plan: GenerationPlan) -> ReshardPlan:
    """Core slots, what they reduce and what is handed to them.

    Raises:
        PlanError: no replica trains, or the smallest one has a unit without a holder.
    """
    replicas = member_replicas(plan)
    training = [entry for entry in replicas if entry[1].mode == "training"]
    if not training:
        raise PlanError("a generation needs a training replica; none trains")
    base, pattern = min(training, key=lambda entry: entry[1].degree)
    position = _positions(model, base, pattern)
    ranks: list[set[int]] = [set() for _ in range(pattern.degree)]
    handovers: list[Flow] = []
    for entry in replicas:
        pairs = _holders(model, entry)
        core = _core_ranks(model, entry, pairs, position, pattern.degree)
        for members, rank in zip(ranks, core, strict=True):
            if rank >= 0:
                members.add(int(rank))
        handovers += _handovers(pairs, position, core)
    groups = [
        SyncGroup(index, tuple(sorted(members)), _units_at(position, index))
        for index, members in enumerate(ranks)
    ]
    world = tuple(range(sum(replica.degree for _, replica in replicas)))
    norms = SyncGroup(len(groups), world, {f: (0,) if f == "replicated" else () for f in FAMILIES})
    return ReshardPlan(pattern.degree, (*groups, norms), tuple(handovers))


def stages(model: ModelConfig, groups: Sequence[SyncGroup], max_elements: int) -> tuple[Stage, ...]:
    """Sharded parameters in backward order, cut where the largest position has `max_elements`.

    The cut is the same on all ranks: whoever is no core slot takes part in the exchanges.
    """
    params = parameters(model)
    found: list[Stage] = []
    numbers: list[int] = []
    elements = np.zeros(len(groups), dtype=np.int64)
    ready = 0
    for at, number in enumerate(reversed(range(len(params)))):
        parameter = params[number]
        if parameter.family == "replicated":
            continue
        numbers.append(number)
        elements += [len(g.units[parameter.family]) * parameter.row_elements for g in groups]
        ready = at
        if elements.max(initial=0) >= max_elements:
            found.append(Stage(tuple(numbers), ready))
            numbers, elements = [], np.zeros_like(elements)
    if numbers:
        found.append(Stage(tuple(numbers), ready))
    return tuple(found)


def flow_bytes(model: ModelConfig, flows: Iterable[Flow], element_bytes: int = 4) -> int:
    """Gradient bytes that `flows` carry one way."""
    return element_bytes * sum(
        len(units) * unit_elements(model, family)
        for flow in flows
        for family, units in flow.units.items()
    )


def _positions(model: ModelConfig, base: int, pattern: ReplicaPlan) -> Positions:
    """Position of every unit: its holder in the smallest replica; of a unit shared by sample the
    one of the first turn, of a key/value head the lowest."""
    found: Positions = {}
    first = msgspec.structs.replace(pattern, holders=first_turn(pattern.holders))
    for family, table in rank_tables(model, [(base, first)]).items():
        if table.min(initial=0) < 0:
            unit = int(np.flatnonzero(table.min(0) < 0)[0])
            raise PlanError(f"replica {pattern.replica} trains without {family} unit {unit}")
        found[family] = table.min(0) - np.int32(base)
    return found


def _holders(model: ModelConfig, entry: tuple[int, ReplicaPlan]) -> Positions:
    """Every (unit, world rank) of one replica once, by family, as `(2, pairs)`, ascending."""
    found: Positions = {}
    for family, table in rank_tables(model, [entry]).items():
        units = np.broadcast_to(np.arange(table.shape[1], dtype=np.int32), table.shape)
        held = table >= 0
        found[family] = np.unique(np.stack([units[held], table[held]]), axis=1)
    return found


def _core_ranks(
    model: ModelConfig,
    entry: tuple[int, ReplicaPlan],
    pairs: Positions,
    position: Positions,
    degree: int,
) -> npt.NDArray[np.int32]:
    """World rank that stands for each position in one replica; -1 where it holds no unit of it.

    Each position takes the free slot that holds most of it, so that least is handed over. Only a
    standby replica may have fewer slots than positions; then one slot stands for several.
    """
    base, replica = entry
    overlap = np.zeros((degree, replica.degree), dtype=np.int64)
    for family, (units, ranks) in pairs.items():
        np.add.at(overlap, (position[family][units], ranks - base), unit_elements(model, family))
    core = np.full(degree, -1, dtype=np.int32)
    free = np.ones(replica.degree, dtype=bool)
    for pair in np.argsort(-overlap, axis=None, kind="stable"):
        at, slot = divmod(int(pair), replica.degree)
        if core[at] < 0 and free[slot] and (overlap[at, slot] or replica.mode == "training"):
            core[at], free[slot] = base + slot, False
        if not free.any() or core.min() >= 0:
            break
    left = (core < 0) & overlap.any(axis=1)
    core[left] = base + overlap[left].argmax(axis=1)
    return core


def _handovers(pairs: Positions, position: Positions, core: npt.NDArray[np.int32]) -> list[Flow]:
    """Flows from holders to core ranks where those differ, ascending by (holder, core, position);
    each is of one position."""
    flows: dict[tuple[int, int, int], dict[str, list[int]]] = {}
    for family, (units, ranks) in pairs.items():
        at = position[family][units]
        for index in np.flatnonzero(core[at] != ranks):
            key = (int(ranks[index]), int(core[at[index]]), int(at[index]))
            flows.setdefault(key, {}).setdefault(family, []).append(int(units[index]))
    return [
        Flow(src, dst, {family: tuple(held.get(family, ())) for family in FAMILIES})
        for (src, dst, _), held in sorted(flows.items())
    ]


def _units_at(position: Positions, index: int) -> Held:
    found: Held = dict.fromkeys(FAMILIES, ())
    for family, at in position.items():
        found[family] = tuple(int(unit) for unit in np.flatnonzero(at == index))
    return found
