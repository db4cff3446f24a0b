"""What a slot does of each family when units are shared: which whole, which in some turns only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.layout.units import rota
from runtime.plan.generation import Holders


@dataclass(frozen=True, slots=True)
class SlotShare:
    """One slot's part of a family: `whole` units for every sample, others in some turns only.

    shared: (turns, units) for every set of turns in which the slot does the same units, in order of
        the lowest unit.
    """

    num_turns: int
    whole: tuple[int, ...]
    shared: tuple[tuple[frozenset[int], tuple[int, ...]], ...]


def shares_by_slot(holders: Holders, family: str, slots: Sequence[int]) -> dict[int, SlotShare]:
    """How each of `slots` works on a stored family."""
    turns = rota(holders, family)
    mine: dict[int, dict[int, set[int]]] = {slot: {} for slot in slots}
    for number, turn in enumerate(turns):
        for unit, slot in enumerate(turn):
            if slot in mine:
                mine[slot].setdefault(unit, set()).add(number)
    found: dict[int, SlotShare] = {}
    for slot, units in mine.items():
        parts: dict[frozenset[int], list[int]] = {}
        for unit, numbers in sorted(units.items()):
            parts.setdefault(frozenset(numbers), []).append(unit)
        whole = parts.pop(frozenset(range(len(turns))), [])
        found[slot] = SlotShare(
            len(turns), tuple(whole), tuple((at, tuple(some)) for at, some in parts.items())
        )
    return found
