"""Import of Hugging Face Llama weights: a folder of theirs becomes a checkpoint at step 0.

Whatever our model cannot express or the files do not fit is refused, by name, before anything is
written. Weights are read by slices and written in parts, so that no more than a part is in memory.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from runtime.config import ModelConfig, TrainConfig
from runtime.engine.checkpoint import CheckpointError, PartCopy, seal, write_part
from runtime.engine.hugging_face import LLAMA, llama_name, num_rows
from runtime.layout.units import FAMILIES, Held, Parameter, num_parameters, num_units, parameters
from runtime.plan.manifest import Manifest

# In memory at a time: parameters and both moments, in fp32.
PART_BYTES = 512_000_000
_STATE_BYTES = 12
_KINDS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Setting of config.json -> the only value that our model knows; absent means that value too.
_FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_scaling": (None,),
    "quantization_config": (None,),
    "sliding_window": (None,),
}


def import_llama(source: Path, target: Path, *, mlp_block: int, vocab_block: int) -> Manifest:
    """Make the Llama in `source` a sealed checkpoint in `target`, which must not exist yet.

    mlp_block, vocab_block: of the model, see `ModelConfig`. Moments are zero, as at step 0.

    Raises:
        CheckpointError: `source` is no Llama that our model can be, or `target` cannot be written.
    """
    settings = _read_json(source / "config.json")
    model = _model(source, settings, mlp_block, vocab_block)
    weights = _Weights(source, model)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists already; name a folder that does not")
    count = max(1, math.ceil(num_parameters(model) * _STATE_BYTES / PART_BYTES))
    try:
        parts = []
        for number in range(count):
            copy = _copy(model, weights, _share(model, number, count))
            parts.append(write_part(target, f"part-{number:05d}", copy))
        manifest = Manifest(
            run=f"import of {source.resolve().name}",
            applied_step=0,
            model=model,
            train=TrainConfig(seq_len=int(settings.get("max_position_embeddings", 2048))),
            parts=tuple(parts),
        )
        seal(target, manifest)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return manifest


def _model(source: Path, settings: dict[str, Any], mlp_block: int, vocab_block: int) -> ModelConfig:
    """The model that config.json describes.

    Raises:
        CheckpointError: names the setting, its value and what is allowed.
    """
    path = source / "config.json"
    if settings.get("model_type") != "llama":
        raise CheckpointError(f"{path} has model_type {settings.get('model_type')!r}; only 'llama'")
    rope = settings.get("rope_parameters") or {}
    for key, allowed in _FIXED.items():
        if settings.get(key, allowed[0]) not in allowed:
            raise CheckpointError(f"{path} has {key} {settings[key]!r}; only {allowed[0]!r}")
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"{path} has rope_type {rope['rope_type']!r}; only 'default'")
    try:
        heads = settings["num_attention_heads"]
        fields = {
            "num_layers": settings["num_hidden_layers"],
            "hidden": settings["hidden_size"],
            "num_query_heads": heads,
            "num_kv_heads": settings.get("num_key_value_heads") or heads,
            "head_dim": settings.get("head_dim") or settings["hidden_size"] // heads,
            "mlp_hidden": settings["intermediate_size"],
            "mlp_block": mlp_block,
            "vocab": settings["vocab_size"],
            "vocab_block": vocab_block,
            "tied": settings.get("tie_word_embeddings", False),
            "rope_theta": rope.get("rope_theta") or settings.get("rope_theta", 10_000.0),
            "norm_eps": settings.get("rms_norm_eps", 1e-6),
        }
        return msgspec.convert(fields, ModelConfig)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from error
    except (msgspec.ValidationError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} does not fit: {error}") from error


class _Weights:
    """The tensors of a Llama, checked against `model` when opened; read by units."""

    def __init__(self, source: Path, model: ModelConfig) -> None:
        self._model = model
        self._files: dict[str, Any] = {}
        for path in _files(source):
            try:
                opened = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            self._files |= dict.fromkeys(opened.keys(), opened)
        self._check(source)

    def _check(self, source: Path) -> None:
        """Every tensor there, none unknown, shapes and types right."""
        wanted = {llama_name(parameter): parameter for parameter in parameters(self._model)}
        # Old files keep what follows from rope_theta; a tied head may be there as a copy.
        spare = {name for name in self._files if name.endswith("rotary_emb.inv_freq")}
        if self._model.tied and LLAMA["head"].name in self._files:
            spare.add(LLAMA["head"].name)
            self._require_copy(source)
        if missing := sorted(wanted.keys() - self._files.keys()):
            raise CheckpointError(f"{source} lacks {_some(missing)}")
        if unknown := sorted(self._files.keys() - wanted.keys() - spare):
            raise CheckpointError(f"{source} has tensors that our model does not: {_some(unknown)}")
        for name, parameter in wanted.items():
            piece = self._files[name].get_slice(name)
            if piece.get_dtype() not in _KINDS:
                allowed = ", ".join(_KINDS.values())
                raise CheckpointError(
                    f"{name} in {source} is {piece.get_dtype()}; allowed: {allowed}"
                )
            if (found := tuple(piece.get_shape())) != (shape := self._shape(parameter)):
                raise CheckpointError(
                    f"{name} in {source} is {list(found)}, but config.json makes it {list(shape)}"
                )

    def _require_copy(self, source: Path) -> None:
        head, embed = LLAMA["head"].name, LLAMA["embed"].name
        if embed in self._files and not torch.equal(self._tensor(head), self._tensor(embed)):
            raise CheckpointError(
                f"{source} says tie_word_embeddings, but {head} differs from {embed}"
            )

    def _tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._files[name].get_tensor(name)
        return found

    def _shape(self, parameter: Parameter) -> tuple[int, ...]:
        shape = (num_rows(self._model, parameter), *parameter.row[1:])
        if parameter.family == "replicated":
            return parameter.row
        return shape[::-1] if LLAMA[parameter.name].order == "columns" else shape

    def units(self, parameter: Parameter, first: int, last: int) -> torch.Tensor:
        """Units `[first, last)` of a parameter, float32 `(units, *row)`.

        Raises:
            CheckpointError: a value is not finite.
        """
        name, order = llama_name(parameter), LLAMA[parameter.name].order
        height = parameter.row[0]
        begin, end = first * height, min(last * height, num_rows(self._model, parameter))
        piece = self._files[name].get_slice(name)
        rows = (piece[:, begin:end].T if order == "columns" else piece[begin:end]).float()
        if not bool(rows.isfinite().all()):
            raise CheckpointError(f"{name} has values that are not finite")
        out = rows.new_zeros((last - first) * height, *parameter.row[1:])
        out[: end - begin] = rows
        out = out.view(last - first, *parameter.row)
        if order != "halves":
            return out
        even, odd = out.chunk(2, dim=1)
        return torch.stack((even, odd), dim=2).flatten(1, 2)


def _copy(model: ModelConfig, weights: _Weights, units: Held) -> PartCopy:
    """Parameters of `units` with moments of zero."""
    tensors = {}
    for parameter in parameters(model):
        if own := units[parameter.family]:
            values = weights.units(parameter, own[0], own[-1] + 1)
            stacked = values.new_zeros((3, *values.shape))
            stacked[0] = values
            tensors[f"{parameter.name}.{parameter.layer}"] = stacked
    return PartCopy(tensors, units)


def _share(model: ModelConfig, number: int, count: int) -> Held:
    """Units of part `number` of `count`."""
    totals = {family: num_units(model, family) for family in FAMILIES}
    return {
        family: tuple(range(number * total // count, (number + 1) * total // count))
        for family, total in totals.items()
    }


def _files(source: Path) -> list[Path]:
    """The safetensors files of a folder: those that its index names, else the only one."""
    index = source / "model.safetensors.index.json"
    if not index.exists():
        if not (source / "model.safetensors").exists():
            raise CheckpointError(
                f"{source} has neither model.safetensors nor {index.name}; weights in another "
                "format must be saved as safetensors first"
            )
        return [source / "model.safetensors"]
    named = _read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files")
    return [source / file for file in sorted(set(named.values()))]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
