"""What is told of a replica's layout: how many units each slot holds, and which. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from runtime.layout.units import STORED_FAMILIES, rota
from runtime.plan.generation import NO_HOLDER, Holders, ReplicaPlan
from storage.holdings import Holdings, Run, SharedUnit, at_home

Units = dict[str, tuple[int, ...]]


def told(replica: ReplicaPlan) -> tuple[Units, Holdings | None]:
    """Units per slot (a shared one counts for the slot of its first turn), and which they are;
    None where they are just the next so many, slot by slot."""
    slots = range(len(replica.gpus))
    counts = {family: Counter(replica.holders[family]) for family in STORED_FAMILIES}
    units = {family: tuple(counts[family][slot] for slot in slots) for family in STORED_FAMILIES}
    found = _holdings(replica.holders, len(slots))
    return units, None if found == at_home(units) else found


def _holdings(holders: Holders, num_slots: int) -> Holdings:
    alone: dict[str, tuple[tuple[Run, ...], ...]] = {}
    shared: dict[str, tuple[SharedUnit, ...]] = {}
    for family in STORED_FAMILIES:
        own: list[list[int]] = [[] for _ in range(num_slots)]
        turned: list[SharedUnit] = []
        for unit, turns in enumerate(zip(*rota(holders, family), strict=True)):
            if len(set(turns)) > 1:
                turned.append(SharedUnit(unit=unit, turns=turns))
            elif turns[0] != NO_HOLDER:
                own[turns[0]].append(unit)
        alone[family] = tuple(_runs(mine) for mine in own)
        if turned:
            shared[family] = tuple(turned)
    return Holdings(alone=alone, shared=shared)


def _runs(units: Iterable[int]) -> tuple[Run, ...]:
    found: list[Run] = []
    for unit in units:
        if found and unit == found[-1][1] + 1:
            found[-1] = (found[-1][0], unit)
        else:
            found.append((unit, unit))
    return tuple(found)
