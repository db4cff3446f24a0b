"""Families, units and parameters: what a slot can hold, derived from the model alone.

A family is a kind of unit; every parameter belongs to one family and stores one row per unit, so
row order is unit order on every peer. Key/value heads ("kv") and norms ("replicated") are derived:
they follow from the holders of the query heads and from the live slots, and no plan stores them.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from runtime.config import ModelConfig
from runtime.plan.generation import NO_HOLDER, Holders, turn_key

STORED_FAMILIES = ("attention", "mlp", "vocab")
FAMILIES = ("attention", "kv", "mlp", "vocab", "replicated")

# Family -> units a slot holds, ascending.
Held = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the logical model; `row` is the shape of one unit's row.

    layer: -1 outside the decoder layers.
    """

    name: str
    layer: int
    family: str
    row: tuple[int, ...]

    @property
    def group(self) -> str:
        """What `train.no_decay` knows it as; tied, the embedding is the head too."""
        named = {"embed": "embedding", "head": "head"}
        return named.get(self.name, "norms" if self.family == "replicated" else "matrices")

    @property
    def row_elements(self) -> int:
        return math.prod(self.row)


def parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """Every parameter in storage order: forward order; gradients become ready in reverse."""
    dim, head, block = model.hidden, model.head_dim, model.mlp_block
    vocab_row = (model.vocab_block, dim)
    out = [Parameter("embed", -1, "vocab", vocab_row)]
    for layer in range(model.num_layers):
        out += [
            Parameter("attn_norm", layer, "replicated", (dim,)),
            Parameter("wq", layer, "attention", (head, dim)),
            Parameter("wk", layer, "kv", (head, dim)),
            Parameter("wv", layer, "kv", (head, dim)),
            Parameter("wo", layer, "attention", (head, dim)),
            Parameter("mlp_norm", layer, "replicated", (dim,)),
            Parameter("gate", layer, "mlp", (block, dim)),
            Parameter("up", layer, "mlp", (block, dim)),
            Parameter("down", layer, "mlp", (block, dim)),
        ]
    out.append(Parameter("final_norm", -1, "replicated", (dim,)))
    if not model.tied:
        out.append(Parameter("head", -1, "vocab", vocab_row))
    return tuple(out)


def num_units(model: ModelConfig, family: str) -> int:
    """Units of `family` in the logical model; the last vocabulary block may be ragged."""
    return {
        "attention": model.num_query_heads,
        "kv": model.num_kv_heads,
        "mlp": model.mlp_hidden // model.mlp_block,
        "vocab": -(-model.vocab // model.vocab_block),
        "replicated": 1,
    }[family]


def num_parameters(model: ModelConfig) -> int:
    """Elements of the whole logical model, padding of the last vocabulary block not counted."""
    padding = num_units(model, "vocab") * model.vocab_block - model.vocab
    padded = padding * model.hidden * sum(p.family == "vocab" for p in parameters(model))
    rows = sum(p.row_elements * num_units(model, p.family) for p in parameters(model))
    return rows - padded


@lru_cache(maxsize=256)
def unit_elements(model: ModelConfig, family: str) -> int:
    """Parameter elements that one unit of `family` comprises over all layers."""
    return sum(p.row_elements for p in parameters(model) if p.family == family)


def unit_name(family: str, unit: int) -> str:
    """A unit in words."""
    return {
        "attention": f"query head {unit}",
        "kv": f"key/value head {unit}",
        "mlp": f"MLP block {unit}",
        "vocab": f"vocabulary block {unit}",
        "replicated": "the norms",
    }[family]


def kv_head(model: ModelConfig, query_head: int) -> int:
    """The key/value head that a query head reads."""
    return query_head // (model.num_query_heads // model.num_kv_heads)


def rota(holders: Holders, family: str) -> tuple[tuple[int, ...], ...]:
    """The turns of a stored family, each the slot of every unit; one turn where none is shared."""
    turns = [holders[family]]
    while (more := holders.get(turn_key(family, len(turns)))) is not None:
        turns.append(more)
    return tuple(turns)


def first_turn(holders: Holders) -> Holders:
    """The layout with one slot per unit: where shared units are summed and counted."""
    return {family: holders[family] for family in STORED_FAMILIES}


def held_by_slot(model: ModelConfig, holders: Holders, slots: Sequence[int]) -> dict[int, Held]:
    """Units of every family on each of `slots`, derived families included.

    A key/value head is held by every slot that holds one of its query heads.
    """
    rows: dict[int, dict[str, list[int]]] = {
        slot: {family: [] for family in FAMILIES} for slot in slots
    }
    for family in STORED_FAMILIES:
        first, *others = rota(holders, family)
        for unit, slot in enumerate(first):
            if slot != NO_HOLDER and slot in rows:
                rows[slot][family].append(unit)
        for slot, unit in {
            (slot, unit)
            for turn in others
            for unit, (slot, whole) in enumerate(zip(turn, first, strict=True))
            if slot != whole and slot in rows
        }:
            insort(rows[slot][family], unit)
    held: dict[int, Held] = {}
    for slot, units in rows.items():
        units["kv"] = sorted({kv_head(model, head) for head in units["attention"]})
        units["replicated"] = [0]
        held[slot] = {family: tuple(units[family]) for family in FAMILIES}
    return held


def held_units(model: ModelConfig, holders: Holders, slot: int) -> Held:
    """Units of every family on one slot; see `held_by_slot`."""
    return held_by_slot(model, holders, (slot,))[slot]


def without(holders: Holders, dead: Sequence[int]) -> Holders:
    """The same layout with holes where `dead` slots were: survivors keep exactly what they hold.

    A shared unit has a hole only if all its slots are dead; else another one stands in.
    """
    gone = frozenset(dead)
    left: Holders = {}
    for family in STORED_FAMILIES:
        turns = rota(holders, family)
        heir = [
            next((s for s in slots if s not in gone), NO_HOLDER)
            for slots in zip(*turns, strict=True)
        ]
        for number, turn in enumerate(turns):
            left[turn_key(family, number)] = tuple(
                heir[unit] if slot in gone else slot for unit, slot in enumerate(turn)
            )
    return left
