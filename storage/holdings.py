"""Which units each slot of a replica holds: a record that the runtime fills and the app shows.

This module must not know any backend.
"""

from __future__ import annotations

import msgspec

# First and last unit of an unbroken run.
Run = tuple[int, int]


class SharedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit that slots split by sample: sample i of the replica falls to `turns[i mod turns]`."""

    unit: int
    turns: tuple[int, ...]


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """alone: family -> runs of units per slot that no other slot of the replica works on.

    shared: family -> units that several slots hold, where there are any.
    """

    alone: dict[str, tuple[tuple[Run, ...], ...]]
    shared: dict[str, tuple[SharedUnit, ...]]


def at_home(units: dict[str, tuple[int, ...]]) -> Holdings:
    """The holdings where every slot holds the next so many units, as a whole replica's do."""
    alone: dict[str, tuple[tuple[Run, ...], ...]] = {}
    for family, counts in units.items():
        runs: list[tuple[Run, ...]] = []
        first = 0
        for count in counts:
            runs.append(((first, first + count - 1),) if count else ())
            first += count
        alone[family] = tuple(runs)
    return Holdings(alone=alone, shared={})
