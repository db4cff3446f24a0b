"""Do all holders of a unit hold the same bits? Parameters and optimizer state, compared per unit.

Gradient sums and elementwise updates round alike on all holders, so any difference is a defect: a
missed gradient, a wrong owner, a corrupted message.
"""

from __future__ import annotations

import torch

from runtime.engine.group import Group
from runtime.engine.state import State

_ODD = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed odd number
_MIX = 0x2545F4914F6CDD1D
_NOT_HELD = torch.iinfo(torch.int64).min


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


@torch.no_grad()
def hashes_agree(state: State, world: Group) -> bool:
    """Compare over all holders; every rank of `world` must call it (one all-reduce)."""
    if world.size == 1:
        return True
    own = unit_hashes(state)
    # max(~x) is ~min(x): equal extremes mean equal hashes. Units not held sit below every hash.
    extremes = torch.stack([own, torch.where(own == _NOT_HELD, own, ~own)])
    world.all_reduce(extremes, "max", on_host=True)
    return bool((extremes[0] == ~extremes[1]).all())
