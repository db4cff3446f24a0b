"""The bare peer: a static column/row-parallel training loop without any fault tolerance.

Written as one would write it by hand (Megatron-LM, arXiv 1909.08053, section 3): native
collectives, gradients reduced in buckets while backward goes on, nothing watched, nothing
committed. It lays its memory out as the engine does and applies the engine's AdamW, so that what
differs is the loop. Equal slots only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from runtime.config import Config
from runtime.engine.data import Text
from runtime.engine.layers import causal_attention, rotary_angles, rotate
from runtime.engine.optimizer import apply_step
from runtime.engine.state import State, StateLayout
from runtime.layout.takeover import home_holders
from runtime.layout.units import held_units

_NORMS = ("attn_norm", "mlp_norm", "final_norm")


class _IntoReplica(Function):
    """Identity; backward sums the gradient over the tensor-parallel group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _OutOfReplica(Function):
    """Sum of the slots' partial outputs; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(partial)
        dist.all_reduce(partial, group=group)
        return partial

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _VocabLoss(Function):
    """Summed cross entropy over vocabulary rows spread evenly over the group."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: Any) -> Tensor:
        top = logits.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        logits = logits.sub_(top.unsqueeze(1))
        index = targets - first
        here = (index >= 0) & (index < logits.shape[1])
        index = index.masked_fill_(~here, 0).unsqueeze(1)
        both = torch.stack(
            [logits.gather(1, index).squeeze(1).masked_fill_(~here, 0.0), logits.exp_().sum(1)]
        )
        dist.all_reduce(both, group=group)
        ctx.save_for_backward(logits.div_(both[1].unsqueeze(1)), index, here)
        return (both[1].log() - both[0]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, index, here = ctx.saved_tensors
        probabilities.scatter_add_(1, index, -here.to(probabilities.dtype).unsqueeze(1))
        return probabilities.mul_(grad), None, None, None


class BareModel:
    """One slot's part of the model; `group` is its tensor-parallel group."""

    def __init__(self, config: Config, state: State, slot: int, degree: int, group: Any) -> None:
        self._model, self._group = config.model, group
        self._heads = self._model.num_query_heads // degree
        self._kv = self._model.num_kv_heads // degree
        self._first = slot * self._model.vocab // degree
        self._rows = self._model.vocab // degree
        self._angles = rotary_angles(
            config.train.seq_len,
            self._model.head_dim,
            self._model.rope_theta,
            state.params.device,
            state.params.dtype,
        )
        self.leaves: dict[tuple[str, int], Tensor] = {}
        self.spans: dict[tuple[str, int], slice] = {}
        self._bind(state)

    def _bind(self, state: State) -> None:
        """Parameters that see the same input lie side by side and become one leaf."""
        fused = {"wq": "wqkv", "wk": "wqkv", "wv": "wqkv", "gate": "gate_up", "up": "gate_up"}
        for extent in state.layout.extents:
            key = (fused.get(extent.parameter.name, extent.parameter.name), extent.parameter.layer)
            start = self.spans[key].start if key in self.spans else extent.start
            self.spans[key] = slice(start, extent.stop)
        width = self._model.hidden
        for key, span in self.spans.items():
            shape = (width,) if key[0] in _NORMS else (-1, width)
            leaf = state.params[span].view(shape).detach().requires_grad_()
            leaf.grad = state.grads[span].view(shape)
            self.leaves[key] = leaf

    def loss(self, tokens: Tensor) -> Tensor:
        """Summed cross entropy of `(batch, seq_len + 1)` tokens, the same on every slot."""
        x = self._embed(tokens[:, :-1])
        for layer in range(self._model.num_layers):
            x = x + _OutOfReplica.apply(self._attention(x, layer), self._group)
            x = x + _OutOfReplica.apply(self._mlp(x, layer), self._group)
        hidden = self._norm(x, "final_norm", -1).flatten(0, 1)
        head = self.leaves["embed" if self._model.tied else "head", -1]
        logits = functional.linear(hidden, head)
        return _VocabLoss.apply(logits, tokens[:, 1:].flatten(), self._first, self._group)

    def _norm(self, x: Tensor, name: str, layer: int) -> Tensor:
        weight = self.leaves[name, layer]
        normed = functional.rms_norm(x, weight.shape, weight, self._model.norm_eps)
        return _IntoReplica.apply(normed, self._group)

    def _embed(self, tokens: Tensor) -> Tensor:
        index = tokens - self._first
        here = (index >= 0) & (index < self._rows)
        rows = functional.embedding(index.masked_fill_(~here, 0), self.leaves["embed", -1])
        return _OutOfReplica.apply(rows * here.unsqueeze(-1), self._group)

    def _attention(self, x: Tensor, layer: int) -> Tensor:
        heads, kv = self._heads, self._kv
        qkv = functional.linear(self._norm(x, "attn_norm", layer), self.leaves["wqkv", layer])
        qkv = qkv.unflatten(-1, (heads + 2 * kv, self._model.head_dim))
        turned = rotate(qkv[:, :, : heads + kv], self._angles)
        key, value = turned[:, :, heads:], qkv[:, :, heads + kv :]
        if kv != heads:
            key = key.repeat_interleave(heads // kv, dim=2)
            value = value.repeat_interleave(heads // kv, dim=2)
        out = causal_attention(turned[:, :, :heads], key, value).flatten(2)
        return out @ self.leaves["wo", layer]

    def _mlp(self, x: Tensor, layer: int) -> Tensor:
        both = functional.linear(self._norm(x, "mlp_norm", layer), self.leaves["gate_up", layer])
        gate, up = both.chunk(2, dim=-1)
        return (functional.silu(gate) * up) @ self.leaves["down", layer]


class _Buckets:
    """Contiguous ranges of the gradients, each all-reduced as soon as backward is through it."""

    def __init__(self, model: BareModel, state: State, group: Any, bucket_mb: float) -> None:
        self._group, self._grads = group, state.grads
        most = max(1, math.ceil(bucket_mb * 1e6 / state.grads.element_size()))
        self._of: dict[tuple[str, int], int] = {}
        self._ranges: list[slice] = []
        self._sizes: list[int] = []
        for key, span in sorted(model.spans.items(), key=lambda item: -item[1].start):
            last = self._ranges[-1] if self._ranges else None
            if last is None or last.stop - span.start > most:
                self._ranges.append(span)
                self._sizes.append(0)
            else:
                self._ranges[-1] = slice(span.start, last.stop)
            self._of[key] = len(self._ranges) - 1
            self._sizes[-1] += 1
        for key, leaf in model.leaves.items():
            leaf.register_post_accumulate_grad_hook(lambda _, key=key: self._ready(key))
        self.begin()

    def begin(self) -> None:
        self._left = list(self._sizes)
        self._works: list[Any] = []

    def _ready(self, key: tuple[str, int]) -> None:
        bucket = self._of[key]
        self._left[bucket] -= 1
        if self._left[bucket] == 0:
            self._works.append(
                dist.all_reduce(self._grads[self._ranges[bucket]], group=self._group, async_op=True)
            )

    def finish(self) -> None:
        for work in self._works:
            work.wait()


class BareLoop:
    """The whole loop of one rank.

    Args:
        replica, slot: this rank's place; replicas and slots are even.
        replica_group: its tensor-parallel group. peer_group: the same slot of all replicas; None
            when `step` is given something else to reduce with.
    """

    def __init__(
        self,
        config: Config,
        *,
        replica: int,
        slot: int,
        degree: int,
        replica_group: Any,
        peer_group: Any = None,
    ) -> None:
        self._config, self._group = config, replica_group
        self._degree = degree
        held = held_units(config.model, home_holders(config.model, degree), slot)
        self.state = State(
            StateLayout(config.model, held),
            applied_step=0,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        self.state.initialise(config.model, config.train.seed)
        self._text = Text(config.train)
        self._model = BareModel(config, self.state, slot, degree, replica_group)
        self._buckets = (
            _Buckets(self._model, self.state, peer_group, config.train.bucket_mb)
            if peer_group is not None
            else None
        )
        self.replica = replica

    def backward(self, num_replicas: int, index: int | None = None) -> float:
        """Forward and backward of this replica's part of the global batch; its summed loss.

        index: which part, of `num_replicas`; by default its own number.
        """
        train, state = self._config.train, self.state
        state.grads.zero_()
        if self._buckets is not None:
            self._buckets.begin()
        share = train.global_batch // num_replicas
        first = state.applied_step * train.global_batch + share * (
            self.replica if index is None else index
        )
        tokens = self._text.samples(first, first + share)
        loss = self._model.loss(tokens)
        (loss * (1.0 / (train.global_batch * train.seq_len))).backward()
        if self._buckets is not None:
            self._buckets.finish()
        return float(loss.detach())

    @torch.no_grad()
    def apply(self) -> None:
        """Clip by the global norm (one reduction over the replica) and step AdamW."""
        grads, decayed = self.state.grads, self.state.layout.matrices
        square = grads[:decayed].square().sum() + grads[decayed:].square().sum() / self._degree
        dist.all_reduce(square, group=self._group)
        apply_step(self._config.train, self.state, math.sqrt(float(square)))

    def step(self, num_replicas: int) -> float:
        """One training step; returns this replica's summed loss."""
        loss = self.backward(num_replicas)
        self.apply()
        return loss


Step = Callable[[], float]
