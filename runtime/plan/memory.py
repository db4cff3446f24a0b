"""How much memory a slot needs: whether a layout fits its GPUs, before anybody takes it. Pure.

Counts what the engine keeps: parameters, gradients and both moments of the units it holds, the
messages of the gradient sync, and what forward keeps of one micro-batch for backward. While state
moves, a rank has its old and its new layout at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from runtime.config import Config, ModelConfig, TrainConfig
from runtime.errors import ConfigError
from runtime.layout.takeover import home_holders
from runtime.layout.units import FAMILIES, Held, held_by_slot, unit_elements
from runtime.plan.generation import Holders

# What contexts, kernels and fragmentation leave of a GPU.
USABLE = 0.92
_BYTES = 4
_BUFFERS = 4  # parameters, gradients, two moments
_MOVING = 3  # of those, what moves: gradients do not

_Layout = tuple[tuple[str, tuple[int, ...]], ...]


class SlotMemory(NamedTuple):
    """Bytes on one slot. moving: of the old layout and of messages, while state moves."""

    state: int
    sync: int
    activations: int
    moving: int

    @property
    def peak(self) -> int:
        return self.state + max(self.sync + self.activations, self.moving)


def slot_memory(
    model: ModelConfig,
    train: TrainConfig,
    held: Held,
    *,
    num_replicas: int,
    num_samples: int,
    before: Held | None = None,
) -> SlotMemory:
    """What a slot that holds `held` needs.

    Args:
        num_replicas: of the run.
        num_samples: its replica's samples of a step; 0 for one that stands by.
        before: what it holds now, if that is other units and has to make room.
    """
    elements = _elements(model, held)
    # Sums with other replicas come in messages beside the gradients; `reshard` has two more.
    messages = 0 if num_replicas == 1 else 1 if train.sync == "direct" else 3
    activations = 0
    if num_samples:
        tokens = min(train.micro_batch, num_samples) * train.seq_len
        activations = tokens * sum(token_bytes(model, train, held))
        if train.precision == "bf16":
            activations += 2 * elements
    moving = 0
    if before is not None and before != held:
        kept = {f: tuple(set(held[f]) & set(before[f])) for f in FAMILIES}
        arriving = elements - _elements(model, kept)
        moving = _BYTES * (_BUFFERS * _elements(model, before) + _MOVING * arriving)
    return SlotMemory(
        state=_BYTES * _BUFFERS * elements,
        sync=_BYTES * messages * elements,
        activations=activations,
        moving=moving,
    )


class Need(NamedTuple):
    """The slot of a layout that needs most."""

    slot: int
    memory: SlotMemory


def largest(
    config: Config, holders: Holders, live: tuple[int, ...], num_samples: int, before: Holders
) -> Need:
    """The live slot that needs most. before: the layout that they come from."""
    new, old = (tuple(sorted(each.items())) for each in (holders, before))
    num_replicas = len(config.cluster.racks)
    return _largest(config.model, config.train, num_replicas, new, live, num_samples, old)


def misfit(config: Config, need: Need) -> str:
    """Why a layout does not fit, with numbers and what helps; "" if it does or nobody knows."""
    there = config.cluster.gpu_memory_gb * 1e9 * USABLE
    memory = need.memory
    if not there or memory.peak <= there:
        return ""
    if memory.moving > memory.sync + memory.activations:
        parts, helps = f"{_gb(memory.moving)} while state moves", "restart from a checkpoint"
    else:
        parts = f"{_gb(memory.sync)} sync, {_gb(memory.activations)} activations"
        helps = "lower train.micro_batch"
        if not config.train.activation_checkpointing:
            helps += " or set train.activation_checkpointing"
    return (
        f"slot {need.slot} would need {_gb(memory.peak)} ({_gb(memory.state)} state, {parts}), but "
        f"has {_gb(there)} of its {config.cluster.gpu_memory_gb:g} GB: {helps}"
    )


def require_fit(config: Config) -> Config:
    """`config`, if its whole replicas fit their GPUs.

    Raises:
        ConfigError: says what a slot would need, and what helps.
    """
    for rack in config.cluster.racks:
        home, live = home_holders(config.model, rack.gpus), tuple(range(rack.gpus))
        samples = -(-config.train.global_batch // len(config.cluster.racks))
        if reason := misfit(config, largest(config, home, live, samples, home)):
            raise ConfigError(
                f"`cluster.gpu_memory_gb` is {config.cluster.gpu_memory_gb:g}; {rack.name} with "
                f"{rack.gpus} GPUs does not fit: {reason}"
            )
    return config


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


@lru_cache(maxsize=256)
def _largest(
    model: ModelConfig,
    train: TrainConfig,
    num_replicas: int,
    layout: _Layout,
    live: tuple[int, ...],
    num_samples: int,
    came_from: _Layout,
) -> Need:
    held = held_by_slot(model, dict(layout), live)
    before = held_by_slot(model, dict(came_from), live)
    needs = [
        Need(
            slot,
            slot_memory(
                model,
                train,
                held[slot],
                num_replicas=num_replicas,
                num_samples=num_samples,
                # A fresh worker holds nothing yet.
                before=before[slot] if before[slot]["attention"] else None,
            ),
        )
        for slot in live
    ]
    return max(needs, key=lambda need: need.memory.peak)


def _elements(model: ModelConfig, units: Mapping[str, tuple[int, ...]]) -> int:
    return sum(len(units[family]) * unit_elements(model, family) for family in FAMILIES)


class TokenBytes(NamedTuple):
    """Bytes per token of a micro-batch. kept: by forward for backward. work: while one block, or
    the loss, is at it."""

    kept: int
    work: int


def token_bytes(model: ModelConfig, train: TrainConfig, held: Held) -> TokenBytes:
    """Of a slot that holds `held`; shared units count as if it worked on them for every sample."""
    part = 2 if train.precision == "bf16" else _BYTES
    num_heads, num_kv = len(held["attention"]), len(held["kv"])
    heads, kv = num_heads * model.head_dim, num_kv * model.head_dim
    columns = len(held["mlp"]) * model.mlp_block
    rows = len(held["vocab"]) * model.vocab_block
    norm = model.hidden * (_BYTES + part)
    # Query, key and value as attention takes them, and its output; keys and values are repeated
    # where several query heads read one.
    wide = 4 * heads + kv if num_heads != num_kv else 3 * heads + 3 * kv
    attention = norm + part * wide + _BYTES * num_heads
    mlp = norm + part * 4 * columns
    if train.dropout:
        attention += heads * (1 + part)
        mlp += columns
    block = attention + mlp
    busiest = max(attention, mlp)
    if train.activation_checkpointing:
        block, busiest = 2 * model.hidden * _BYTES, 2 * busiest
    kept = model.num_layers * block + norm + rows * _BYTES
    return TokenBytes(kept, max(busiest, 2 * rows * _BYTES))
