"""How much of a replica's arithmetic each slot does, in units of a healthy slot.

The planner predicts with it and the emulated device paces by it, so both always agree. FLOPs are
counted per sample for the forward pass; backward is twice that everywhere and cancels out.
"""

from __future__ import annotations

from functools import lru_cache

from runtime.config import ModelConfig
from runtime.layout.shares import shares_by_slot
from runtime.layout.takeover import home_holders
from runtime.layout.units import (
    FAMILIES,
    STORED_FAMILIES,
    held_by_slot,
    kv_head,
    rota,
    unit_elements,
)
from runtime.plan.generation import Holders


def unit_flops(model: ModelConfig, seq_len: int, family: str) -> int:
    """Forward FLOPs per sample that one unit of `family` costs, over all layers.

    Matrix rows cost 2 FLOPs per element and token; a query head adds causal scores and values,
    `2 * seq_len * head_dim` per token. Embedding lookup and norms count as nothing.
    """
    if family == "replicated":
        return 0
    if family == "vocab":
        return 2 * model.vocab_block * model.hidden * seq_len
    flops = 2 * unit_elements(model, family) * seq_len
    if family == "attention":
        flops += 2 * seq_len * seq_len * model.head_dim * model.num_layers
    return flops


def slot_flops(
    model: ModelConfig, seq_len: int, holders: Holders, num_slots: int
) -> tuple[float, ...]:
    """Forward FLOPs per sample on every slot `0..num_slots-1`; 0 for slots that hold nothing.

    A unit that slots share by sample counts for each with its share of the turns, and so does the
    key/value head that every part of a slot's query heads computes for itself.
    """
    slots = range(num_slots)
    cost = {family: unit_flops(model, seq_len, family) for family in FAMILIES}
    if all(len(rota(holders, family)) == 1 for family in STORED_FAMILIES):
        held = held_by_slot(model, holders, slots)
        return tuple(
            sum(len(units) * cost[family] for family, units in held[slot].items()) for slot in slots
        )
    total = [0.0] * num_slots
    for family in STORED_FAMILIES:
        for slot, share in shares_by_slot(holders, family, slots).items():
            parts = [(1.0, share.whole)]
            parts += [(len(turns) / share.num_turns, units) for turns, units in share.shared]
            for weight, units in parts:
                total[slot] += weight * len(units) * cost[family]
                if family == "attention":
                    total[slot] += weight * cost["kv"] * len({kv_head(model, u) for u in units})
    return tuple(total)


@lru_cache(maxsize=64)
def _healthy_flops(model: ModelConfig, seq_len: int, num_slots: int) -> float:
    return max(slot_flops(model, seq_len, home_holders(model, num_slots), num_slots))


def work_by_slot(
    model: ModelConfig, seq_len: int, holders: Holders, num_slots: int
) -> tuple[float, ...]:
    """Work per sample of every slot, where 1.0 is the busiest slot of the home layout."""
    healthy = _healthy_flops(model, seq_len, num_slots)
    return tuple(flops / healthy for flops in slot_flops(model, seq_len, holders, num_slots))


def slot_work(
    model: ModelConfig, seq_len: int, holders: Holders, slot: int, *, num_slots: int
) -> float:
    """Work per sample of one slot, in units of a healthy slot's work per sample.

    num_slots: slots of the replica's home layout, dead ones included (`len(ReplicaPlan.gpus)`).
    """
    return work_by_slot(model, seq_len, holders, num_slots)[slot]
