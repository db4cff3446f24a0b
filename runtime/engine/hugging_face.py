"""Weights as Hugging Face's Llama keeps them: safetensors and a config.json.

Two things differ: theirs turns the first half of a head against the second where ours turns
neighbours (so query and key rows change places within a head), and they store a matrix that writes
to the residual stream transposed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from runtime.config import ModelConfig
from runtime.engine.checkpoint import CheckpointError


def llama_weights(model: ModelConfig, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Llama's tensors by name, from whole unit-major parameters by `name.layer` (`read_full`)."""
    flat = {name: tensor.flatten(0, 1) for name, tensor in full.items()}
    out = {
        "model.embed_tokens.weight": flat["embed.-1"][: model.vocab],
        "model.norm.weight": flat["final_norm.-1"],
    }
    for layer in range(model.num_layers):
        own, theirs = f".{layer}", f"model.layers.{layer}"
        out |= {
            f"{theirs}.input_layernorm.weight": flat["attn_norm" + own],
            f"{theirs}.self_attn.q_proj.weight": _halves(full["wq" + own]),
            f"{theirs}.self_attn.k_proj.weight": _halves(full["wk" + own]),
            f"{theirs}.self_attn.v_proj.weight": flat["wv" + own],
            f"{theirs}.self_attn.o_proj.weight": flat["wo" + own].T,
            f"{theirs}.post_attention_layernorm.weight": flat["mlp_norm" + own],
            f"{theirs}.mlp.gate_proj.weight": flat["gate" + own],
            f"{theirs}.mlp.up_proj.weight": flat["up" + own],
            f"{theirs}.mlp.down_proj.weight": flat["down" + own].T,
        }
    if not model.tied:
        out["lm_head.weight"] = flat["head.-1"][: model.vocab]
    return {name: tensor.contiguous() for name, tensor in out.items()}


def llama_config(model: ModelConfig, seq_len: int) -> dict[str, object]:
    """The config.json that fits `llama_weights`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.mlp_hidden,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_query_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def export_llama(
    folder: Path, model: ModelConfig, full: Mapping[str, torch.Tensor], seq_len: int
) -> None:
    """Write model.safetensors and config.json into `folder`.

    Raises:
        CheckpointError: they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        weights = llama_weights(model, full)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.dumps(llama_config(model, seq_len), indent=2)
        (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot export to {folder}: {error}") from error


def _halves(heads: torch.Tensor) -> torch.Tensor:
    """Rows `(heads, head_dim, hidden)` with the even ones of each head first, flattened."""
    return torch.cat((heads[:, 0::2], heads[:, 1::2]), dim=1).flatten(0, 1)
