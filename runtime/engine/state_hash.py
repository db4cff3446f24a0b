"""Do all holders of a unit hold the same bits? Parameters and optimizer state, compared per unit.

Gradient sums and elementwise updates round alike on all holders, so any difference is a defect: a
missed gradient, a wrong owner, a corrupted message.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from runtime.engine.group import Group
from runtime.engine.state import State

_ODD = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed odd number
_MIX = 0x2545F4914F6CDD1D
_NOT_HELD = torch.iinfo(torch.int64).min
# Of the units that differ, so many are looked at for who is odd, and so many are named.
_MOST_LOOKED_AT = 256
_MOST_NAMED = 8


def unit_hashes(state: State) -> torch.Tensor:
    """One int64 per unit of every family, in `num_units` order; the least int64 if not held."""
    device = state.params.device
    offsets: dict[str, int] = {}
    total = 0
    for family, count in state.layout.num_units.items():
        offsets[family] = total
        total += count
    mine = torch.zeros(total, dtype=torch.int64, device=device)
    bits_type = torch.int64 if state.params.dtype == torch.float64 else torch.int32
    for number, parameter in enumerate(state.layout.parameters):
        units = state.layout.held[parameter.family]
        if not units:
            continue
        index = torch.tensor(units, device=device) + offsets[parameter.family]
        position = torch.arange(parameter.row_elements, device=device)
        for tensor_number, flat in enumerate(state.moving()):
            bits = state.rows(flat, number).flatten(1).view(bits_type).to(torch.int64)
            salt = 2 * (3 * number + tensor_number) + 1
            # int64 arithmetic wraps; the odd factor of each position keeps order significant.
            mixed = ((bits + salt) * _MIX) ^ ((bits + salt) >> 7)
            mine[index] += (mixed * ((2 * position + salt) * _ODD)).sum(1) * salt
    out = torch.full_like(mine, _NOT_HELD)
    for family, units in state.layout.held.items():
        if units:
            index = torch.tensor(units, device=device) + offsets[family]
            out[index] = mine[index]
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Holders of the same units that do not hold the same bits.

    units: which, as (family, unit), the first few. odd: world ranks that differ from more than half
    of a unit's holders, ascending. unsure: those of units where no such majority is.
    """

    units: tuple[tuple[str, int], ...]
    odd: tuple[int, ...]
    unsure: tuple[int, ...]


@torch.no_grad()
def find_difference(state: State, world: Group) -> Difference | None:
    """Compare over all holders; None: all agree. Every rank of `world` must call it.

    One all-reduce; who differs is asked only when somebody does.

    Raises:
        GenerationAborted: aborted, or a peer is gone.
    """
    if world.size == 1:
        return None
    own = unit_hashes(state)
    # max(~x) is ~min(x): equal extremes mean equal hashes. Units not held sit below every hash.
    extremes = torch.stack([own, torch.where(own == _NOT_HELD, own, ~own)])
    world.all_reduce(extremes, "max", on_host=True)
    numbers = (extremes[0] != ~extremes[1]).nonzero().flatten()[:_MOST_LOOKED_AT]
    if not len(numbers):
        return None
    columns = world.all_gather(own[numbers]).t().tolist()
    odd: set[int] = set()
    unsure: set[int] = set()
    for hashes in columns:
        holders = [rank for rank, value in enumerate(hashes) if value != _NOT_HELD]
        value, count = Counter(hashes[rank] for rank in holders).most_common(1)[0]
        if 2 * count > len(holders):
            odd.update(rank for rank in holders if hashes[rank] != value)
        else:
            unsure.update(holders)
    names = [(f, unit) for f, count in state.layout.num_units.items() for unit in range(count)]
    return Difference(
        units=tuple(names[number] for number in numbers.tolist()[:_MOST_NAMED]),
        odd=tuple(sorted(odd)),
        unsure=tuple(sorted(unsure - odd)),
    )
