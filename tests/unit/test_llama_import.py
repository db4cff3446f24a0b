"""Import of Hugging Face Llama weights: bit for bit, whoever saved them; refusals name why."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from runtime.cli import cli
from runtime.config import ModelConfig
from runtime.engine import llama_import
from runtime.engine.checkpoint import read_full, read_manifest
from runtime.engine.hugging_face import export_llama, llama_weights
from runtime.engine.reference import logits
from runtime.engine.state import initial_row
from runtime.layout.units import num_units, parameters

TOKENS = torch.arange(24).view(2, 12) * 7 % 250
MODEL = ModelConfig(
    num_layers=2,
    hidden=24,
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=4,
    mlp_hidden=40,
    vocab=257,
    rope_theta=5e5,
    norm_eps=2e-6,
)
Weights = dict[str, torch.Tensor]


def some_weights(model: ModelConfig) -> Weights:
    """Whole parameters, norms that are not all one."""
    found = {}
    for p in parameters(model):
        rows = [initial_row(model, p, unit, 3) for unit in range(num_units(model, p.family))]
        whole = torch.stack(rows)
        if p.family == "replicated":
            whole = whole + torch.linspace(-0.5, 0.5, model.hidden)
        found[f"{p.name}.{p.layer}"] = whole
    return found


def run_import(source: Path, target: Path, *options: str) -> Result:
    return CliRunner().invoke(
        cli, ["checkpoint", "import", str(source), "--to", str(target), *options]
    )


def imported(source: Path, target: Path) -> tuple[ModelConfig, Weights]:
    result = run_import(source, target)
    assert result.exit_code == 0, result.output
    model = read_manifest(target, verify=True).model
    step, full = read_full(target, model)
    assert step == 0
    return model, full


def llama(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    fields = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 257,
        "rms_norm_eps": 2e-6,
        "rope_theta": 5e5,
    }
    return LlamaForCausalLM(LlamaConfig(**fields | settings)).eval()


@pytest.mark.parametrize("part_bytes", [10**9, 20_000])
@pytest.mark.parametrize("tied", [True, False])
def test_what_was_exported_comes_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, part_bytes: int
) -> None:
    monkeypatch.setattr(llama_import, "PART_BYTES", part_bytes)
    model = ModelConfig(**{f: getattr(MODEL, f) for f in MODEL.__struct_fields__} | {"tied": tied})
    full = some_weights(model)
    export_llama(tmp_path / "llama", model, full, 64)
    found_model, found = imported(tmp_path / "llama", tmp_path / "step-0")
    assert found_model == model
    assert len(read_manifest(tmp_path / "step-0").parts) > (part_bytes < 10**9)
    assert found.keys() == full.keys()
    assert all(torch.equal(found[key], full[key]) for key in full)
    again = CliRunner().invoke(
        cli, ["checkpoint", "export", str(tmp_path / "step-0"), str(tmp_path / "again")]
    )
    assert again.exit_code == 0, again.output
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("llama", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("shard", ["10GB", "10KB"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_saved_computes_the_same(tmp_path: Path, tied: bool, shard: str) -> None:
    theirs = llama(tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path / "llama", max_shard_size=shard)
    assert (tmp_path / "llama" / "model.safetensors").exists() == (shard == "10GB")
    model, full = imported(tmp_path / "llama", tmp_path / "step-0")
    params = {
        (p.name, p.layer): full[f"{p.name}.{p.layer}"] for p in parameters(model)
    }  # fmt: skip
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        found = logits(model, params, TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    saved = theirs.state_dict()
    for name, tensor in llama_weights(model, full).items():
        assert torch.equal(tensor, saved[name]), name


def test_half_precision_is_taken_without_loss(tmp_path: Path) -> None:
    theirs = llama().to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "llama")
    model, full = imported(tmp_path / "llama", tmp_path / "step-0")
    saved = theirs.state_dict()
    for name, tensor in llama_weights(model, full).items():
        assert torch.equal(tensor, saved[name].float()), name


def change_config(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        found = json.loads(path.read_text()) | settings
        path.write_text(json.dumps({k: v for k, v in found.items() if v != "absent"}))

    return change


def change_tensors(**tensors: torch.Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        found: Mapping[str, torch.Tensor | None] = load_file(path) | {
            name.replace("__", "."): tensor for name, tensor in tensors.items()
        }
        save_file({name: t for name, t in found.items() if t is not None}, path)

    return change


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DEFECTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "another kind": (change_config(model_type="gpt2"), "model_type 'gpt2'; only 'llama'"),
    "a bias": (change_config(attention_bias=True), "attention_bias True; only False"),
    "another activation": (change_config(hidden_act="gelu"), "hidden_act 'gelu'; only 'silu'"),
    "scaled positions": (
        change_config(rope_parameters={"rope_type": "llama3", "factor": 8.0}),
        "rope_type 'llama3'; only 'default'",
    ),
    "heads": (change_config(num_attention_heads=5), "num_kv_heads"),
    "dims": (change_config(hidden_size=32), "config.json makes it [257, 32]"),
    "head dims": (change_config(head_dim=5), "head_dim"),
    "vocab": (change_config(vocab_size=300), "is [257, 24], but config.json makes it [300, 24]"),
    "layers": (change_config(num_hidden_layers=3), "lacks model.layers.2.input_layernorm.weight"),
    "a setting is missing": (change_config(vocab_size="absent"), "lacks 'vocab_size'"),
    "a word for a number": (change_config(hidden_size="wide"), "does not fit"),
    "a tensor is missing": (change_tensors(model__norm__weight=None), "lacks model.norm.weight"),
    "a tensor too many": (
        change_tensors(model__extra__weight=torch.zeros(2)),
        "tensors that our model does not: model.extra.weight",
    ),
    "a head that is no copy": (
        change_tensors(lm_head__weight=torch.zeros(257, 24)),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
    "numbers of another type": (
        change_tensors(model__norm__weight=torch.ones(24, dtype=torch.float64)),
        "model.norm.weight in {} is F64; allowed: float32, bfloat16, float16",
    ),
    "a number that is none": (
        change_tensors(model__norm__weight=torch.full((24,), torch.nan)),
        "model.norm.weight has values that are not finite",
    ),
    "a file cut short": (cut_short, "model.safetensors cannot be read"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safete"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
}


@pytest.mark.parametrize(("spoil", "says"), DEFECTS.values(), ids=DEFECTS)
def test_what_does_not_fit_is_told_and_nothing_is_left(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    source, target = tmp_path / "llama", tmp_path / "step-0"
    export_llama(source, MODEL, some_weights(MODEL), 64)
    spoil(source)
    result = run_import(source, target)
    assert result.exit_code != 0
    assert says.format(source) in str(result.exception)
    assert not target.exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source, target = tmp_path / "llama", tmp_path / "step-0"
    export_llama(source, MODEL, some_weights(MODEL), 64)
    target.mkdir()
    (target / "mine").write_text("kept")
    result = run_import(source, target)
    assert "exists already" in str(result.exception)
    assert [path.name for path in target.iterdir()] == ["mine"]


def test_blocks_must_divide(tmp_path: Path) -> None:
    export_llama(tmp_path / "llama", MODEL, some_weights(MODEL), 64)
    result = run_import(tmp_path / "llama", tmp_path / "step-0", "--mlp-block", "16")
    assert "a multiple of mlp_block (16)" in str(result.exception)
