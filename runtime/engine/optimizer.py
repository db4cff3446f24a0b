"""AdamW on the flat state: decay by groups, one learning rate and clip factor."""

from __future__ import annotations

import math

import torch

from runtime.config import TrainConfig
from runtime.engine.state import State
from runtime.plan.generation import NOT_FINITE

_NORM_FLOOR = 1e-6


def learning_rate(train: TrainConfig, step: int) -> float:
    """Learning rate of `step` (counted from 0): linear warmup, then constant or a cosine.

    The cosine goes by tokens trained on before `step`, from the warmup's end to `decay_tokens`.
    """
    if step < train.warmup_steps or not train.decay_tokens:
        return train.lr * min(1.0, (step + 1) / max(1, train.warmup_steps))
    step_tokens = train.global_batch * train.seq_len
    began = train.warmup_steps * step_tokens
    done = (step * step_tokens - began) / max(1, train.decay_tokens - began)
    share = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return train.min_lr + (train.lr - train.min_lr) * share


def clip_factor(train: TrainConfig, grad_norm: float) -> float:
    """Factor on every gradient; depends on the global norm only, so it is equal on all ranks."""
    return min(1.0, train.clip_norm / (grad_norm + _NORM_FLOOR))


@torch.no_grad()
def apply_step(train: TrainConfig, state: State, grad_norm: float) -> None:
    """Apply the synchronised gradients of step `state.applied_step` and count it as applied.

    With NOT_FINITE for a norm the step is counted and moves nothing, neither parameters nor
    moments; learning rate and bias correction go on as if it had.
    Local and without waits: a rank that starts it finishes it (or dies). Consumes the gradients.
    """
    count = state.applied_step + 1
    if grad_norm != NOT_FINITE:
        _update(train, state, grad_norm, count)
    state.applied_step = count
    state.grad_norm = grad_norm
    state.synced = False


def _update(train: TrainConfig, state: State, grad_norm: float, count: int) -> None:
    lr = learning_rate(train, state.applied_step)
    beta1, beta2 = train.betas
    grads = state.grads.mul_(clip_factor(train, grad_norm))
    state.exp_avg.lerp_(grads, 1 - beta1)
    state.exp_avg_sq.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
    denominator = torch.sqrt(state.exp_avg_sq, out=grads)
    denominator.div_(math.sqrt(1 - beta2**count)).add_(train.eps)
    if train.weight_decay:
        for span in state.layout.decayed(train.no_decay):
            state.params[span].mul_(1 - lr * train.weight_decay)
    state.params.addcdiv_(state.exp_avg, denominator, value=-lr / (1 - beta1**count))
