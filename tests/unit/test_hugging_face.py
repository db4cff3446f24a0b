"""Exported weights: the same logits and loss in Llama's own arithmetic and in `transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch.nn import functional

from runtime.cli import cli
from runtime.config import ClusterConfig, Config, ModelConfig, RackConfig
from runtime.engine.checkpoint import copy_part, seal, write_part
from runtime.engine.reference import Reference, logits
from runtime.engine.state import State, StateLayout
from runtime.layout.takeover import home_holders
from runtime.layout.units import held_units
from runtime.plan.manifest import Manifest

TOKENS = torch.arange(24).view(2, 12) * 7 % 250


def config_of(*, tied: bool) -> Config:
    model = ModelConfig(
        num_layers=2,
        hidden=24,
        num_query_heads=6,
        num_kv_heads=2,
        head_dim=4,
        mlp_hidden=40,
        vocab=257,
        tied=tied,
        rope_theta=5e5,
        norm_eps=2e-6,
    )
    return Config(model=model, cluster=ClusterConfig(racks=(RackConfig(name="r", gpus=1),)))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Config, Path]:
    """A checkpoint of fresh weights, exported by the command."""
    config = config_of(tied=request.param)
    model = config.model
    held = held_units(model, home_holders(model, 1), 0)
    layout = StateLayout(model, held)
    state = State(layout, applied_step=0, device=torch.device("cpu"), dtype=torch.float32)
    state.initialise(model, config.train.seed)
    folder, target = tmp_path / "step-00000000", tmp_path / "llama"
    part = write_part(folder, "r/0", copy_part(state, held))
    seal(folder, Manifest(run="r", applied_step=0, model=model, train=config.train, parts=(part,)))
    runner = CliRunner()
    assert "whole" in runner.invoke(cli, ["checkpoint", "verify", str(folder)]).output
    result = runner.invoke(cli, ["checkpoint", "export", str(folder), str(target)])
    assert result.exit_code == 0, result.output
    return config, target


def ours(config: Config) -> torch.Tensor:
    with torch.no_grad():
        return logits(config.model, Reference(config).params, TOKENS)


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Llama's RoPE: `x * cos + rotate_half(x) * sin` over `(batch, heads, time, head_dim)`."""
    size = x.shape[-1]
    inverse = theta ** (-torch.arange(0, size, 2) / size)
    angle = torch.outer(torch.arange(x.shape[2]).float(), inverse).repeat(1, 2)
    half = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1)
    return x * angle.cos() + half * angle.sin()


def test_the_weights_give_the_same_logits_in_llamas_arithmetic(
    exported: tuple[Config, Path],
) -> None:
    config, target = exported
    w, c = load_file(target / "model.safetensors"), json.loads((target / "config.json").read_text())
    x = w["model.embed_tokens.weight"][TOKENS]
    width, eps = (c["hidden_size"],), c["rms_norm_eps"]
    for layer in range(c["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in w.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        normed = functional.rms_norm(x, width, own["input_layernorm.weight"], eps)
        q, k, v = (
            (normed @ own[f"self_attn.{n}_proj.weight"].T)
            .unflatten(-1, (-1, c["head_dim"]))
            .transpose(1, 2)
            for n in "qkv"
        )
        q, k = rotated(q, c["rope_theta"]), rotated(k, c["rope_theta"])
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + mixed.transpose(1, 2).flatten(-2) @ own["self_attn.o_proj.weight"].T
        normed = functional.rms_norm(x, width, own["post_attention_layernorm.weight"], eps)
        gate, up = (normed @ own[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
    found = functional.rms_norm(x, width, w["model.norm.weight"], eps) @ head.T
    torch.testing.assert_close(found, ours(config), rtol=1e-4, atol=1e-5)


def test_transformers_gives_the_same_logits_and_loss(exported: tuple[Config, Path]) -> None:
    from transformers import LlamaForCausalLM

    config, target = exported
    assert LlamaForCausalLM.from_pretrained(target).config.rope_parameters["rope_theta"] == 5e5
    with torch.no_grad():
        found = LlamaForCausalLM.from_pretrained(target)(TOKENS, labels=TOKENS)
    expected = ours(config)
    torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-5)
    loss = functional.cross_entropy(expected[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    torch.testing.assert_close(found.loss, loss, rtol=1e-5, atol=1e-6)
