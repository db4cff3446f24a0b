"""The yardstick: the same logical model and training loop in one process, written independently.

Full weights, plain autograd, `torch.optim.AdamW`. It shares with the engine only what defines the
run: initial rows, text, dropout masks, learning rate, clipping rule. Tests and `bench parity`
compare against it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from runtime.config import Config, ModelConfig
from runtime.engine.data import Text
from runtime.engine.dropout import Dropout
from runtime.engine.optimizer import clip_factor, learning_rate
from runtime.engine.state import initial_row
from runtime.layout.units import num_units, parameters

# Drops values of `(batch, time, all units * width)`, given the layer and the family.
Drop = Callable[[Tensor, int, str], Tensor]


class Reference:
    """A one-process run of `config`; `params` maps (name, layer) to `(units, *row)` tensors."""

    def __init__(self, config: Config, *, dtype: torch.dtype = torch.float32) -> None:
        self._config = config
        self._text = Text(config.train)
        self.params: dict[tuple[str, int], Tensor] = {}
        decayed: list[Tensor] = []
        plain: list[Tensor] = []
        for parameter in parameters(config.model):
            rows = [
                initial_row(config.model, parameter, unit, config.train.seed)
                for unit in range(num_units(config.model, parameter.family))
            ]
            tensor = torch.stack(rows).to(dtype).requires_grad_()
            self.params[parameter.name, parameter.layer] = tensor
            (plain if parameter.group in config.train.no_decay else decayed).append(tensor)
        train = config.train
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": train.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=train.lr,
            betas=train.betas,
            eps=train.eps,
        )
        self.step_number = 0

    def step(self) -> tuple[float, float]:
        """Train the next step; returns (mean loss per token, gradient norm before clipping)."""
        train = self._config.train
        first = self.step_number * train.global_batch
        tokens = self._text.samples(first, first + train.global_batch)
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(
            logits(self._config.model, self.params, tokens[:, :-1], self._drop(first)).flatten(
                0, 1
            ),
            tokens[:, 1:].flatten(),
        )
        loss.backward()
        grads = [tensor.grad for tensor in self.params.values() if tensor.grad is not None]
        norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt().item()
        for grad in grads:
            grad.mul_(clip_factor(train, norm))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(train, self.step_number)
        self._optimizer.step()
        self.step_number += 1
        return loss.item(), norm

    def _drop(self, first: int) -> Drop | None:
        """Drops from all units of a family at once; `first` is the step's first sample."""
        train = self._config.train
        if not train.dropout:
            return None
        dropout = Dropout(train.dropout, train.seed)
        samples = torch.arange(first, first + train.global_batch)

        def drop(x: Tensor, layer: int, family: str) -> Tensor:
            units = torch.arange(num_units(self._config.model, family))
            return dropout(x, layer, family, units, samples)

        return drop

    def skip(self) -> None:
        """Pass over a step, not the first, as if it had not been finite: it counts all the same."""
        for state in self._optimizer.state.values():
            state["step"] += 1
        self.step_number += 1


def logits(
    model: ModelConfig,
    params: dict[tuple[str, int], Tensor],
    tokens: Tensor,
    drop: Drop | None = None,
) -> Tensor:
    """Logits `(batch, time, vocab)` of tokens `(batch, time)`."""
    embed = params["embed", -1].flatten(0, 1)[: model.vocab]
    head = embed if model.tied else params["head", -1].flatten(0, 1)[: model.vocab]
    x = functional.embedding(tokens, embed)
    for layer in range(model.num_layers):
        weights = {name: params[name, at] for name, at in params if at == layer}
        x = x + _attention(model, weights, _norm(model, x, weights["attn_norm"]), layer, drop)
        hidden = _norm(model, x, weights["mlp_norm"])
        gate, up, down = (weights[name].flatten(0, 1) for name in ("gate", "up", "down"))
        inner = functional.silu(hidden @ gate.T) * (hidden @ up.T)
        x = x + (drop(inner, layer, "mlp") if drop else inner) @ down
    return _norm(model, x, params["final_norm", -1]) @ head.T


def _norm(model: ModelConfig, x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (model.hidden,), weight[0], model.norm_eps)


def _attention(
    model: ModelConfig, weights: dict[str, Tensor], x: Tensor, layer: int, drop: Drop | None
) -> Tensor:
    query, key, value = (
        torch.einsum("btd,hed->bhte", x, weights[name]) for name in ("wq", "wk", "wv")
    )
    out = functional.scaled_dot_product_attention(
        _rotate(model, query), _rotate(model, key), value, is_causal=True, enable_gqa=True
    )
    out = out.transpose(1, 2).flatten(2)
    if drop is not None:
        out = drop(out, layer, "attention")
    return out @ weights["wo"].flatten(0, 1)


def _rotate(model: ModelConfig, heads: Tensor) -> Tensor:
    """RoPE on neighbouring pairs of `(batch, heads, time, head_dim)`, in real arithmetic."""
    half = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
    time = torch.arange(heads.shape[2], dtype=torch.float64)
    angle = time[:, None] * model.rope_theta ** -half[None, :]
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    even, odd = heads[..., 0::2], heads[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
