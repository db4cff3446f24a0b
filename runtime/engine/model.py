"""One slot's share of the decoder (RMSNorm, RoPE, SwiGLU, grouped-query attention).

The model owns no memory: its leaves are views into the state's flat buffers, gradients included.
Neighbouring parameters that see the same input form one leaf, so that q, k, v and gate, up cost one
product each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch.nn import functional

from runtime.config import ModelConfig
from runtime.engine.finite import Probe
from runtime.engine.group import Group
from runtime.engine.layers import (
    NormIntoReplica,
    SumOverReplica,
    VocabParallelLoss,
    causal_attention,
    rotary_angles,
    rotate,
)
from runtime.engine.parts import Cut, Parts
from runtime.engine.state import State
from runtime.layout.shares import SlotShare
from runtime.layout.units import Held, kv_head

_LEAVES = {
    "embed": ("embed",),
    "attn_norm": ("attn_norm",),
    "wqkv": ("wq", "wk", "wv"),
    "wo": ("wo",),
    "mlp_norm": ("mlp_norm",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
    "final_norm": ("final_norm",),
    "head": ("head",),
}


class SlotModel:
    """Forward pass of one slot over `state`; `group` is the replica's tensor-parallel group."""

    def __init__(
        self,
        model: ModelConfig,
        state: State,
        group: Group,
        seq_len: int,
        shares: Mapping[str, SlotShare] = MappingProxyType({}),
    ) -> None:
        """shares: how this slot works on each stored family; none given: on all units it holds."""
        self._model = model
        self._group = group
        self.probe: Probe | None = None
        self._leaves: dict[tuple[str, int], torch.Tensor] = {}
        self._numbers: dict[tuple[str, int], tuple[int, ...]] = {}
        self._bind(state)
        held = state.layout.held
        self._device = device = state.params.device
        self._heads = _Heads(model, held["attention"], held["kv"], device)
        self._attention_parts = _shared(shares.get("attention"), device)
        self._mlp_parts = _shared(shares.get("mlp"), device)
        self._cut(held)
        self._angles = rotary_angles(
            seq_len, model.head_dim, model.rope_theta, device, state.params.dtype
        )
        rows = torch.full((len(held["vocab"]), model.vocab_block), -1)
        local = torch.full((model.vocab + model.vocab_block,), -1)
        for index, unit in enumerate(held["vocab"]):
            rows[index] = torch.arange(model.vocab_block) + index * model.vocab_block
            first = unit * model.vocab_block
            local[first : first + model.vocab_block] = rows[index]
        self._row_of_token = local[: model.vocab].to(device)
        ragged = -model.vocab % model.vocab_block
        last = -(-model.vocab // model.vocab_block) - 1
        self._num_padded = ragged if last in held["vocab"] else 0

    def _bind(self, state: State) -> None:
        params = state.layout.parameters
        number_of = {(p.name, p.layer): number for number, p in enumerate(params)}
        for leaf, names in _LEAVES.items():
            for layer in sorted({p.layer for p in params if p.name == names[0]}):
                numbers = tuple(number_of[name, layer] for name in names)
                extents = [state.layout.extents[number] for number in numbers]
                span = slice(extents[0].start, extents[-1].stop)
                width = params[numbers[0]].row[-1]
                shape = (width,) if leaf.endswith("norm") else (-1, width)
                tensor = state.params[span].view(shape).detach().requires_grad_()
                tensor.grad = state.grads[span].view(shape)
                self._leaves[leaf, layer] = tensor
                self._numbers[leaf, layer] = numbers

    def _cut(self, held: Held) -> None:
        """Where the parts of shared families lie in their leaves."""
        model, heads, kv = self._model, held["attention"], held["kv"]
        if self._attention_parts is not None:
            self._part_heads: list[_Heads] = []
            rows: list[list[int]] = []
            outputs: list[list[int]] = []
            for part in self._attention_parts.parts:
                needed = tuple(sorted({kv_head(model, head) for head in part.units}))
                self._part_heads.append(_Heads(model, part.units, needed, self._device))
                queries = [heads.index(head) for head in part.units]
                keys = [len(heads) + kv.index(head) for head in needed]
                outputs.append(queries)
                rows.append([*queries, *keys, *(row + len(kv) for row in keys)])
            self._cut_qkv = Cut(rows, len(heads) + 2 * len(kv), model.head_dim)
            self._cut_wo = Cut(outputs, len(heads), model.head_dim)
        if self._mlp_parts is not None:
            blocks = held["mlp"]
            mine = [[blocks.index(unit) for unit in part.units] for part in self._mlp_parts.parts]
            both = [[*rows, *(row + len(blocks) for row in rows)] for rows in mine]
            self._cut_gate_up = Cut(both, 2 * len(blocks), model.mlp_block)
            self._cut_down = Cut(mine, len(blocks), model.mlp_block)

    def on_gradient(self, ready: Callable[[tuple[int, ...]], None]) -> None:
        """Call `ready(parameter numbers)` whenever backward has accumulated a leaf's gradient."""
        for key, leaf in self._leaves.items():
            numbers = self._numbers[key]
            leaf.register_post_accumulate_grad_hook(lambda _, n=numbers: ready(n))

    def loss(self, tokens: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Summed cross entropy of one micro-batch, the same on every slot of the replica.

        tokens: `(batch, seq_len + 1)`; position t predicts t + 1. first: number of the first sample
        among the replica's samples of the step. Every slot of the replica must call it, and run
        backward on the result, in the same order.
        """
        rows = self._row_of_token[tokens]
        x = self._embed(rows[:, :-1])
        for layer in range(self._model.num_layers):
            x = x + self._summed(self._attention(x, layer, first), layer, 0)
            x = x + self._summed(self._mlp(x, layer, first), layer, 1)
        hidden = self._norm(x, "final_norm", -1)
        head = self._leaves["embed" if self._model.tied else "head", -1]
        logits = functional.linear(hidden.flatten(0, 1), head)
        targets = rows[:, 1:].flatten()
        loss = VocabParallelLoss.apply(logits, targets, self._num_padded, self._group)
        if self.probe is not None:
            self.probe.loss(loss)
        return loss

    def _summed(self, partial: torch.Tensor, layer: int, block: int) -> torch.Tensor:
        if self.probe is not None:
            self.probe.block(layer, block, partial)
        return SumOverReplica.apply(partial, self._group)

    def _norm(self, x: torch.Tensor, leaf: str, layer: int) -> torch.Tensor:
        return NormIntoReplica.apply(
            x, self._leaves[leaf, layer], self._model.norm_eps, self._group
        )

    def _embed(self, rows: torch.Tensor) -> torch.Tensor:
        table = self._leaves["embed", -1]
        if self._group.size == 1:
            return functional.embedding(rows, table)
        if table.shape[0] == 0:
            out = table.new_zeros((*rows.shape, table.shape[1]))
        else:
            here = (rows >= 0).unsqueeze(-1).to(table.dtype)
            out = functional.embedding(rows.clamp(min=0), table) * here
        return SumOverReplica.apply(out, self._group)

    def _attention(self, x: torch.Tensor, layer: int, first: int) -> torch.Tensor:
        """This slot's partial attention output `(batch, time, hidden)`."""
        normed = self._norm(x, "attn_norm", layer)
        wqkv, wo = self._leaves["wqkv", layer], self._leaves["wo", layer]
        if self._attention_parts is None:
            return self._heads.attend(normed, wqkv, wo, self._angles)
        cut, cut_out, heads = self._cut_qkv(wqkv), self._cut_wo(wo), self._part_heads
        return self._attention_parts.apply(
            normed, first, lambda n, some: heads[n].attend(some, cut[n], cut_out[n], self._angles)
        )

    def _mlp(self, x: torch.Tensor, layer: int, first: int) -> torch.Tensor:
        """This slot's partial MLP output `(batch, time, hidden)`."""
        normed = self._norm(x, "mlp_norm", layer)
        gate_up, down = self._leaves["gate_up", layer], self._leaves["down", layer]
        if self._mlp_parts is None:
            return _swiglu(normed, gate_up, down)
        cut, cut_down = self._cut_gate_up(gate_up), self._cut_down(down)
        return self._mlp_parts.apply(
            normed, first, lambda number, some: _swiglu(some, cut[number], cut_down[number])
        )


class _Heads:
    """Attention over some query heads and the key/value heads that they read."""

    def __init__(
        self, model: ModelConfig, heads: Sequence[int], kv: Sequence[int], device: torch.device
    ) -> None:
        self._num_heads, self._num_kv, self._head_dim = len(heads), len(kv), model.head_dim
        position = {head: index for index, head in enumerate(kv)}
        reads = [position[kv_head(model, head)] for head in heads]
        self._kv_index = (
            None if reads == list(range(len(kv))) else torch.tensor(reads, device=device)
        )

    def attend(
        self, normed: torch.Tensor, wqkv: torch.Tensor, wo: torch.Tensor, angles: torch.Tensor
    ) -> torch.Tensor:
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
        return qkv @ wo


def _swiglu(normed: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = functional.linear(normed, gate_up).chunk(2, dim=-1)
    return (functional.silu(gate) * up) @ down


def _shared(share: SlotShare | None, device: torch.device) -> Parts | None:
    return Parts(share, device) if share is not None and share.num_turns > 1 else None
