"""One slot's share of the decoder (RMSNorm, RoPE, SwiGLU, grouped-query attention).

The model owns no memory: its leaves are views into the state's flat buffers, gradients included.
Neighbouring parameters that see the same input form one leaf, so that q, k, v and gate, up cost one
product each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from runtime.config import ModelConfig, TrainConfig
from runtime.engine.blocks import Drop, Heads, Mlp
from runtime.engine.dropout import Dropout
from runtime.engine.finite import Probe
from runtime.engine.group import Group
from runtime.engine.layers import (
    NormIntoReplica,
    SumOverReplica,
    VocabParallelLoss,
    rotary_angles,
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


@dataclass(frozen=True, slots=True)
class _Samples:
    """A micro-batch: which of the replica's samples it begins with, and its samples' numbers in
    the run, int64 `(batch,)`."""

    first: int
    numbers: torch.Tensor


_Block = Callable[[torch.Tensor, int, _Samples], torch.Tensor]


class SlotModel:
    """Forward pass of one slot over `state`; `group` is the replica's tensor-parallel group."""

    def __init__(
        self,
        model: ModelConfig,
        state: State,
        group: Group,
        train: TrainConfig,
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
        self._dropout = Dropout(train.dropout, train.seed) if train.dropout else None
        self._half = train.precision == "bf16"
        self._recomputes = train.activation_checkpointing
        self._heads = Heads(model, held["attention"], held["kv"], device)
        self._blocks = Mlp(held["mlp"], device)
        self._attention_parts = _shared(shares.get("attention"), device)
        self._mlp_parts = _shared(shares.get("mlp"), device)
        self._cut(held)
        self._angles = rotary_angles(
            train.seq_len, model.head_dim, model.rope_theta, device, state.params.dtype
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
            self._part_heads: list[Heads] = []
            rows: list[list[int]] = []
            outputs: list[list[int]] = []
            for part in self._attention_parts.parts:
                needed = tuple(sorted({kv_head(model, head) for head in part.units}))
                self._part_heads.append(Heads(model, part.units, needed, self._device))
                queries = [heads.index(head) for head in part.units]
                keys = [len(heads) + kv.index(head) for head in needed]
                outputs.append(queries)
                rows.append([*queries, *keys, *(row + len(kv) for row in keys)])
            self._cut_qkv = Cut(rows, len(heads) + 2 * len(kv), model.head_dim)
            self._cut_wo = Cut(outputs, len(heads), model.head_dim)
        if self._mlp_parts is not None:
            blocks = held["mlp"]
            self._part_blocks = [Mlp(p.units, self._device) for p in self._mlp_parts.parts]
            mine = [[blocks.index(unit) for unit in part.units] for part in self._mlp_parts.parts]
            both = [[*rows, *(row + len(blocks) for row in rows)] for rows in mine]
            self._cut_gate_up = Cut(both, 2 * len(blocks), model.mlp_block)
            self._cut_down = Cut(mine, len(blocks), model.mlp_block)

    def on_gradient(self, ready: Callable[[tuple[int, ...]], None]) -> None:
        """Call `ready(parameter numbers)` whenever backward has accumulated a leaf's gradient."""
        for key, leaf in self._leaves.items():
            numbers = self._numbers[key]
            leaf.register_post_accumulate_grad_hook(lambda _, n=numbers: ready(n))

    def loss(self, tokens: torch.Tensor, first: int, number: int) -> torch.Tensor:
        """Summed cross entropy of one micro-batch, the same on every slot of the replica.

        Args:
            tokens: `(batch, seq_len + 1)`; position t predicts t + 1.
            first: which of the replica's samples of the step the first one is.
            number: which of the run's.

        Every slot of the replica must call it, and run backward on the result, in the same order.
        """
        samples = torch.arange(number, number + len(tokens), device=tokens.device)
        at = _Samples(first, samples)
        rows = self._row_of_token[tokens]
        with self._precision():
            x = self._embed(rows[:, :-1])
            for layer in range(self._model.num_layers):
                for block, compute in enumerate((self._attention, self._mlp)):
                    partial = self._partial(compute, x, layer, at)
                    if self.probe is not None:
                        self.probe.block(layer, block, partial)
                    x = x + SumOverReplica.apply(partial, self._group)
            hidden = self._norm(x, "final_norm", -1)
            head = self._leaves["embed" if self._model.tied else "head", -1]
            logits = functional.linear(hidden.flatten(0, 1), head).to(x.dtype)
            targets = rows[:, 1:].flatten()
            loss = VocabParallelLoss.apply(logits, targets, self._num_padded, self._group)
        if self.probe is not None:
            self.probe.loss(loss)
        return loss

    def _precision(self) -> AbstractContextManager[None]:
        """Products in bfloat16 if set so; parameters, residual stream and sums stay as they are."""
        if not self._half:
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _partial(self, compute: _Block, x: torch.Tensor, layer: int, at: _Samples) -> torch.Tensor:
        """What `compute` gives on this slot, computed again in backward if set so.

        Nothing but what lies between two collectives is: the slots' order of collectives, and every
        bit, stay as they are without recomputation.
        """
        if not self._recomputes:
            return compute(x, layer, at)
        out: torch.Tensor = checkpoint(
            compute, x, layer, at, use_reentrant=False, preserve_rng_state=False
        )
        return out

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

    def _attention(self, x: torch.Tensor, layer: int, at: _Samples) -> torch.Tensor:
        """This slot's partial attention output `(batch, time, hidden)`."""
        normed = self._norm(x, "attn_norm", layer)
        wqkv, wo = self._leaves["wqkv", layer], self._leaves["wo", layer]
        drop, angles = self._drop(layer, "attention"), self._angles
        if self._attention_parts is None:
            return self._heads.attend(normed, wqkv, wo, angles, drop(at.numbers))
        cut, cut_out, heads = self._cut_qkv(wqkv), self._cut_wo(wo), self._part_heads
        return self._attention_parts.apply(
            normed,
            at.first,
            lambda n, some, which: heads[n].attend(
                some, cut[n], cut_out[n], angles, drop(at.numbers[which])
            ),
        )

    def _mlp(self, x: torch.Tensor, layer: int, at: _Samples) -> torch.Tensor:
        """This slot's partial MLP output `(batch, time, hidden)`."""
        normed = self._norm(x, "mlp_norm", layer)
        gate_up, down = self._leaves["gate_up", layer], self._leaves["down", layer]
        drop = self._drop(layer, "mlp")
        if self._mlp_parts is None:
            return self._blocks.apply(normed, gate_up, down, drop(at.numbers))
        cut, cut_down, blocks = self._cut_gate_up(gate_up), self._cut_down(down), self._part_blocks
        return self._mlp_parts.apply(
            normed,
            at.first,
            lambda n, some, which: blocks[n].apply(
                some, cut[n], cut_down[n], drop(at.numbers[which])
            ),
        )

    def _drop(self, layer: int, family: str) -> Callable[[torch.Tensor], Drop | None]:
        """What drops activations of `family`, given the numbers of the samples; None: nothing."""
        dropout = self._dropout
        if dropout is None:
            return lambda numbers: None
        return lambda numbers: lambda x, units: dropout(x, layer, family, units, numbers)


def _shared(share: SlotShare | None, device: torch.device) -> Parts | None:
    return Parts(share, device) if share is not None and share.num_turns > 1 else None
