"""Who holds what: the home layout, and how survivors share out a dead slot's units.

Takeover moves as little as it can: a unit goes home if its home slot lives, else stays where it
is, else goes to the slot with the fewest units of its family. Counts differ by at most one per
family, and ties go to the slot with the least work, so that an extra head and an extra MLP block
do not meet.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.config import ModelConfig
from runtime.errors import PlanError
from runtime.layout.units import STORED_FAMILIES, num_units, rota, unit_elements
from runtime.plan.generation import Holders


def _families_by_weight(model: ModelConfig) -> list[tuple[str, int]]:
    """Stored families with the weight of one unit (matrix elements), heaviest first."""
    weights = [(family, unit_elements(model, family)) for family in STORED_FAMILIES]
    return sorted(weights, key=lambda pair: (-pair[1], pair[0]))


def home_holders(model: ModelConfig, num_slots: int) -> Holders:
    """The layout of a whole replica: balanced, contiguous, larger shares where least work lies.

    Raises:
        PlanError: no slot.
    """
    if num_slots < 1:
        raise PlanError(f"a replica needs 1 slot or more, not {num_slots}")
    load = [0] * num_slots
    home: Holders = {}
    for family, weight in _families_by_weight(model):
        base, extra = divmod(num_units(model, family), num_slots)
        favoured = set(sorted(range(num_slots), key=lambda slot: (load[slot], slot))[:extra])
        owners: list[int] = []
        for slot in range(num_slots):
            count = base + (slot in favoured)
            owners += [slot] * count
            load[slot] += count * weight
        home[family] = tuple(owners)
    return {family: home[family] for family in STORED_FAMILIES}


def takeover(model: ModelConfig, home: Holders, holders: Holders, live: Sequence[int]) -> Holders:
    """The layout over `live`, reached from `holders` with the fewest moves.

    Args:
        home: the replica's home layout.
        holders: the current layout; may have holes, may name dead slots and share units, which
            the result does not (`runtime.layout.fractional` shares the remainder out).
        live: the slots that shall hold everything, in any order.

    Raises:
        PlanError: no live slot.
    """
    slots = sorted(set(live))
    if not slots:
        raise PlanError("a replica without a live slot has no layout")
    alive = frozenset(slots)
    kept = {
        family: [
            next((slot for slot in (at_home, *now) if slot in alive), None)
            for at_home, *now in zip(home[family], *rota(holders, family), strict=True)
        ]
        for family in STORED_FAMILIES
    }
    weights = _families_by_weight(model)
    load = dict.fromkeys(slots, 0)
    for family, weight in weights:
        for slot in kept[family]:
            if slot is not None:
                load[slot] += weight
    taken: Holders = {}
    for family, weight in weights:
        taken[family] = _share_out(home[family], kept[family], load, weight)
    return {family: taken[family] for family in STORED_FAMILIES}


def _share_out(
    home: Sequence[int], kept: Sequence[int | None], load: dict[int, int], weight: int
) -> tuple[int, ...]:
    """Give every orphan (None) of one family a slot, then even out; updates `load` in place."""
    owners = list(kept)
    count = dict.fromkeys(load, 0)
    for slot in owners:
        if slot is not None:
            count[slot] += 1
    for unit, slot in enumerate(owners):
        if slot is None:
            heir = min(load, key=lambda s: (count[s], load[s], s))
            owners[unit] = heir
            count[heir] += 1
            load[heir] += weight
    while max(count.values()) - min(count.values()) > 1:
        giver = max(load, key=lambda s: (count[s], load[s], -s))
        heir = min(load, key=lambda s: (count[s], load[s], s))
        # A slot above the mean always has a guest: home layouts are balanced over more slots.
        unit = next(u for u, slot in enumerate(owners) if slot == giver and home[u] != giver)
        owners[unit] = heir
        count[giver] -= 1
        count[heir] += 1
        load[giver] -= weight
        load[heir] += weight
    return tuple(slot for slot in owners if slot is not None)
