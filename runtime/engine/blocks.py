"""What a slot computes of attention and MLP, between one collective and the next.

Works in the precision of the moment and gives back the stream's: what is summed over slots is
summed in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from runtime.config import ModelConfig
from runtime.engine.layers import causal_attention, rotate
from runtime.layout.units import kv_head

# Drops some of `(batch, time, units * width)` values, given which units they are of.
Drop = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Heads:
    """Attention over some query heads and the key/value heads that they read."""

    def __init__(
        self, model: ModelConfig, heads: Sequence[int], kv: Sequence[int], device: torch.device
    ) -> None:
        self._num_heads, self._num_kv, self._head_dim = len(heads), len(kv), model.head_dim
        self._units = torch.tensor(heads, dtype=torch.int64, device=device)
        position = {head: index for index, head in enumerate(kv)}
        reads = [position[kv_head(model, head)] for head in heads]
        self._kv_index = (
            None if reads == list(range(len(kv))) else torch.tensor(reads, device=device)
        )

    def attend(
        self, normed: torch.Tensor, wqkv: torch.Tensor, wo: torch.Tensor, angles: torch.Tensor,
        drop: Drop | None,
    ) -> torch.Tensor:  # fmt: skip
        """normed: `(batch, time, hidden)`; wqkv: rows of queries, keys, values; wo: of queries."""
        heads, kv = self._num_heads, self._num_kv
        qkv = functional.linear(normed, wqkv)
        if heads:
            qkv = qkv.unflatten(-1, (heads + 2 * kv, self._head_dim))
            turned = rotate(qkv[:, :, : heads + kv], angles)
            key, value = turned[:, :, heads:], qkv[:, :, heads + kv :]
            if self._kv_index is not None:
                key, value = key[:, :, self._kv_index], value[:, :, self._kv_index]
            qkv = causal_attention(turned[:, :, :heads], key, value).flatten(2)
            if drop is not None:
                qkv = drop(qkv, self._units)
        return (qkv @ wo).to(normed.dtype)


class Mlp:
    """SwiGLU over some blocks of hidden columns."""

    def __init__(self, blocks: Sequence[int], device: torch.device) -> None:
        self._units = torch.tensor(blocks, dtype=torch.int64, device=device)

    def apply(
        self, normed: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, drop: Drop | None
    ) -> torch.Tensor:
        """normed: `(batch, time, hidden)`; gate_up: rows of all gates, then of all ups."""
        gate, up = functional.linear(normed, gate_up).chunk(2, dim=-1)
        inner = functional.silu(gate) * up
        if drop is not None:
            inner = drop(inner, self._units)
        return (inner @ down).to(normed.dtype)
