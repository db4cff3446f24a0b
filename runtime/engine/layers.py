"""The pieces of a tensor-parallel decoder that talk to the other slots of their replica.

One all-reduce per attention or MLP block and direction. Backward's sits before the norm, not after
it: the gradient is linear from there on, so each slot's norm gradient stays a partial that the
gradient sync sums like any other. Every slot calls every collective, also with an empty shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional

from runtime.engine.group import Group


class NormIntoReplica(Function):
    """RMSNorm of the replicated stream; backward sums the stream's gradient over the replica."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, group: Group
    ) -> torch.Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        ctx.group = group
        return normed * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, scale, weight = ctx.saved_tensors
        product = grad * normed
        grad_weight = product.view(-1, product.shape[-1]).sum(0)
        mean = (product @ weight).unsqueeze(-1).div_(normed.shape[-1])
        grad_x = torch.addcmul(grad * weight, normed, mean, value=-1).mul_(scale)
        ctx.group.all_reduce(grad_x)
        return grad_x, grad_weight, None, None


class SumOverReplica(Function):
    """All-reduce of the slots' partial outputs, in place; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.mark_dirty(partial)
        group.all_reduce(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None


class VocabParallelLoss(Function):
    """Sum of the cross entropies of logits whose vocabulary rows are spread over the replica.

    Args of `forward`: logits `(tokens, local rows)`, overwritten; rows `(tokens,)` the target's
    local row, -1 where another slot holds it; num_padded: last rows that are no vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, rows: torch.Tensor, num_padded: int, group: Group
    ) -> torch.Tensor:
        # Nothing else reads the logits, so their memory becomes the probabilities.
        count, width = logits.shape
        if num_padded:
            logits[:, width - num_padded :] = -torch.inf
        here = rows >= 0
        index = rows.clamp(min=0).unsqueeze(1)
        mine = logits.new_zeros((3, count))
        if width:
            torch.amax(logits, dim=1, out=mine[0])
            mine[2] = logits.gather(1, index).squeeze(1).masked_fill_(~here, 0.0)
            torch.sum(torch.exp(logits - mine[0].unsqueeze(1)), dim=1, out=mine[1])
        else:
            mine[0] = torch.finfo(logits.dtype).min
        top, mass, target = group.all_gather(mine).unbind(1)
        total = top.amax(0)
        total = total + (mass * torch.exp(top - total)).sum(0).log_()
        if width:
            logits.sub_(total.unsqueeze(1)).exp_()
        ctx.save_for_backward(logits, index, here)
        return (total - target.sum(0)).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, index, here = ctx.saved_tensors
        if probabilities.shape[1]:
            probabilities.scatter_add_(1, index, -here.to(probabilities.dtype).unsqueeze(1))
            probabilities *= grad
        return probabilities, None, None, None


def rotate(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding over pairs of neighbours.

    heads: `(batch, time, heads, head_dim)`; angles: complex `(time, 1, head_dim / 2)` of modulus 1.
    """
    exact = heads.to(angles.real.dtype)
    pairs = torch.view_as_complex(exact.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles).flatten(-2).to(heads.dtype)


def rotary_angles(
    seq_len: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Unit complex numbers `(seq_len, 1, head_dim / 2)` to `rotate` by."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), theta**-exponent)
    kind = torch.complex128 if dtype == torch.float64 else torch.complex64
    return torch.polar(torch.ones_like(angle), angle).to(device=device, dtype=kind).unsqueeze(1)


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of `(batch, time, heads, head_dim)` tensors with equally many heads each."""
    out = functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
    )
    return out.transpose(1, 2)
