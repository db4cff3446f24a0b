"""Weights as Hugging Face's Llama keeps them: names, order of rows, config.json; and export.

Two things differ from ours: theirs turns the first half of a head against the second where ours
turns neighbours (so query and key rows change places within a head), and they store a matrix that
writes to the residual stream transposed. Import is `runtime.engine.llama_import`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from runtime.config import ModelConfig
from runtime.engine.checkpoint import CheckpointError
from runtime.layout.units import Parameter, num_units, parameters


class LlamaTensor(NamedTuple):
    """name: "{}" stands for the layer. order: of our rows in it: as they are, the even rows of
    each head before the odd ones, or as columns."""

    name: str
    order: Literal["rows", "halves", "columns"] = "rows"


# Ours -> theirs.
LLAMA = {
    "embed": LlamaTensor("model.embed_tokens.weight"),
    "attn_norm": LlamaTensor("model.layers.{}.input_layernorm.weight"),
    "wq": LlamaTensor("model.layers.{}.self_attn.q_proj.weight", "halves"),
    "wk": LlamaTensor("model.layers.{}.self_attn.k_proj.weight", "halves"),
    "wv": LlamaTensor("model.layers.{}.self_attn.v_proj.weight"),
    "wo": LlamaTensor("model.layers.{}.self_attn.o_proj.weight", "columns"),
    "mlp_norm": LlamaTensor("model.layers.{}.post_attention_layernorm.weight"),
    "gate": LlamaTensor("model.layers.{}.mlp.gate_proj.weight"),
    "up": LlamaTensor("model.layers.{}.mlp.up_proj.weight"),
    "down": LlamaTensor("model.layers.{}.mlp.down_proj.weight", "columns"),
    "final_norm": LlamaTensor("model.norm.weight"),
    "head": LlamaTensor("lm_head.weight"),
}


def llama_name(parameter: Parameter) -> str:
    """What Llama calls `parameter`."""
    return LLAMA[parameter.name].name.format(parameter.layer)


def num_rows(model: ModelConfig, parameter: Parameter) -> int:
    """Rows of `parameter` without those that only fill up the last vocabulary block."""
    if parameter.family == "vocab":
        return model.vocab
    return num_units(model, parameter.family) * parameter.row[0]


def llama_weights(model: ModelConfig, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Llama's tensors by name, from whole unit-major parameters by `name.layer` (`read_full`)."""
    out = {}
    for parameter in parameters(model):
        units = full[f"{parameter.name}.{parameter.layer}"]
        order = LLAMA[parameter.name].order
        if order == "halves":
            units = torch.cat((units[:, 0::2], units[:, 1::2]), dim=1)
        rows = units.flatten(0, 1)[: num_rows(model, parameter)]
        out[llama_name(parameter)] = (rows.T if order == "columns" else rows).contiguous()
    return out


def llama_config(model: ModelConfig, seq_len: int) -> dict[str, object]:
    """The config.json that fits `llama_weights`, as old and new versions of `transformers` read
    it."""
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
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
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
