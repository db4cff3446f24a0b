"""The DTensor peer: torch's own tensor parallelism with DDP around it, in its best wiring.

Best wiring, as measured: the input of attention and of the MLP becomes a replicated DTensor once
(three column-parallel layers would each sum its gradient), loss over sharded logits, fused AdamW.
Same model, samples, initial weights and clipping as ours.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from runtime.config import Config, ModelConfig
from runtime.engine.data import Text
from runtime.engine.layers import causal_attention, rotary_angles, rotate
from runtime.engine.optimizer import clip_factor, learning_rate
from runtime.engine.state import State, StateLayout
from runtime.layout.takeover import home_holders
from runtime.layout.units import held_units


class _Attention(nn.Module):
    def __init__(self, model: ModelConfig, angles: Tensor) -> None:
        super().__init__()
        width, head = model.hidden, model.head_dim
        self.wq = nn.Linear(width, model.num_query_heads * head, bias=False)
        self.wk = nn.Linear(width, model.num_kv_heads * head, bias=False)
        self.wv = nn.Linear(width, model.num_kv_heads * head, bias=False)
        self.wo = nn.Linear(model.num_query_heads * head, width, bias=False)
        self._head = head
        self._angles = angles

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self._head)) for layer in (self.wq, self.wk, self.wv)
        )
        query, key = rotate(query, self._angles), rotate(key, self._angles)
        times = query.shape[2] // key.shape[2]
        if times > 1:
            key, value = key.repeat_interleave(times, 2), value.repeat_interleave(times, 2)
        return self.wo(causal_attention(query, key, value).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.mlp_hidden, bias=False)
        self.up = nn.Linear(model.hidden, model.mlp_hidden, bias=False)
        self.down = nn.Linear(model.mlp_hidden, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class _Layer(nn.Module):
    def __init__(self, model: ModelConfig, angles: Tensor) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(model.hidden, eps=model.norm_eps)
        self.attention = _Attention(model, angles)
        self.mlp_norm = nn.RMSNorm(model.hidden, eps=model.norm_eps)
        self.mlp = _Mlp(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class _Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        model = config.model
        angles = rotary_angles(
            config.train.seq_len,
            model.head_dim,
            model.rope_theta,
            torch.device("cpu"),
            torch.float32,
        )
        self.embed = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(_Layer(model, angles) for _ in range(model.num_layers))
        self.final_norm = nn.RMSNorm(model.hidden, eps=model.norm_eps)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.final_norm(x))


class DTensorLoop:
    """One rank of it; needs the default process group over `num_replicas * degree` ranks.

    Raises:
        ValueError: a tied model: DDP's localisation of DTensors does not keep parameters tied.
    """

    def __init__(self, config: Config, *, num_replicas: int, degree: int) -> None:
        if config.model.tied:
            raise ValueError("the DTensor peer needs `model.tied = false`")
        self._config = config
        mesh = init_device_mesh("cpu", (num_replicas, degree), mesh_dim_names=("dp", "tp"))
        self._replica = mesh["dp"].get_local_rank()
        self._share = config.train.global_batch // num_replicas
        self._degree = degree
        self._group = mesh["tp"].get_group()
        decoder = _Decoder(config)
        _load_initial(decoder, config)
        _parallelize(decoder, mesh["tp"])
        self._module = DistributedDataParallel(decoder, device_mesh=mesh["dp"])
        norms = [p for name, p in decoder.named_parameters() if "norm" in name]
        matrices = [p for name, p in decoder.named_parameters() if "norm" not in name]
        self._sharded, self._replicated = matrices, norms
        train = config.train
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": train.weight_decay},
                {"params": norms, "weight_decay": 0.0},
            ],
            lr=train.lr,
            betas=train.betas,
            eps=train.eps,
            fused=True,
        )
        self._text = Text(train)
        self._step = 0

    def step(self) -> float:
        """One training step; returns this replica's summed loss."""
        train = self._config.train
        first = self._step * train.global_batch + self._share * self._replica
        tokens = self._text.samples(first, first + self._share)
        self._optimizer.zero_grad(set_to_none=True)
        with loss_parallel():
            logits = self._module(tokens[:, :-1]).flatten(0, 1)
            loss = functional.cross_entropy(logits, tokens[:, 1:].flatten())
            # DDP takes the mean over replicas; shares are even, so this is the mean over all.
            loss.backward()
        self._clip()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(train, self._step)
        self._optimizer.step()
        self._step += 1
        value: Any = loss.detach()
        value = value.to_local() if hasattr(value, "to_local") else value
        return float(value) * self._share * train.seq_len

    @torch.no_grad()
    def _clip(self) -> None:
        sharded = [p.grad for p in self._sharded if p.grad is not None]
        whole = [p.grad for p in self._replicated if p.grad is not None]
        square = torch.stack(torch._foreach_norm(sharded)).square().sum()
        square += torch.stack(torch._foreach_norm(whole)).square().sum() / self._degree
        dist.all_reduce(square, group=self._group)
        factor = clip_factor(self._config.train, math.sqrt(float(square)))
        torch._foreach_mul_([*sharded, *whole], factor)


def _load_initial(decoder: _Decoder, config: Config) -> None:
    """The initial weights of a run of ours, whole."""
    model = config.model
    held = held_units(model, home_holders(model, 1), 0)
    layout = StateLayout(model, held)
    state = State(layout, applied_step=0, device=torch.device("cpu"), dtype=torch.float32)
    state.initialise(model, config.train.seed)
    inside = {"wq": "attention", "wk": "attention", "wv": "attention", "wo": "attention"}
    inside |= {"gate": "mlp", "up": "mlp", "down": "mlp"}
    with torch.no_grad():
        for number, parameter in enumerate(layout.parameters):
            rows = state.rows(state.params, number).flatten(0, -2)
            owner: Any = decoder if parameter.layer < 0 else decoder.layers[parameter.layer]
            if parameter.name in inside:
                owner = getattr(owner, inside[parameter.name])
            weight = getattr(owner, parameter.name).weight
            if parameter.family == "replicated":
                rows = rows.flatten()
            weight.copy_(rows.T if parameter.name in ("wo", "down") else rows)


def _parallelize(decoder: _Decoder, mesh: Any) -> None:
    once = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    parallelize_module(
        decoder,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    plan: dict[str, ParallelStyle] = {"attention": once, "mlp": once}
    plan |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"attention.wo": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    for layer in decoder.layers:
        parallelize_module(layer, mesh, plan)
