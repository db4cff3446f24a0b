"""Checkpoints that know units, not layouts: written by any shape, read by any shape.

Every rank writes the units it is canonical for as one safetensors part; a manifest with checksums,
written last and renamed into place, makes the parts a checkpoint. Learning rate and all randomness
are functions of seed and step, which the manifest has, beside the data cursor and the ledger.
Copying and writing are apart: while a run trains, only the copy holds it up.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from runtime.config import ModelConfig
from runtime.engine.state import State
from runtime.errors import CounterpoiseError
from runtime.layout.units import Held, num_units, parameters
from runtime.plan.manifest import Manifest, Part

MANIFEST = "manifest.json"


class CheckpointError(CounterpoiseError):
    """A checkpoint that cannot be written or trusted; names the file and the way out."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint whose files are not what was written: it will never be good again."""


@dataclass(frozen=True, slots=True)
class PartCopy:
    """A rank's part of a checkpoint in memory of its own: tensors `(3, units, *row)` by name."""

    tensors: dict[str, torch.Tensor]
    units: Held


def copy_part(state: State, units: Held) -> PartCopy:
    """Copy the rows of `units` with their moments to the host's memory."""
    tensors: dict[str, torch.Tensor] = {}
    for number, parameter in enumerate(state.layout.parameters):
        held = state.layout.held[parameter.family]
        rows = [held.index(unit) for unit in units[parameter.family]]
        if rows:
            picked = torch.tensor(rows, device=state.params.device)
            tensors[f"{parameter.name}.{parameter.layer}"] = torch.stack(
                [state.rows(flat, number).index_select(0, picked) for flat in state.moving()]
            ).cpu()
    return PartCopy(tensors, units)


def write_part(folder: Path, name: str, copy: PartCopy) -> Part:
    """Write a part to disk for good; returns its entry in the manifest.

    Raises:
        CheckpointError: the file cannot be written.
    """
    path = folder / f"{name.replace('/', '_')}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(copy.tensors, path)
        with path.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        size = path.stat().st_size
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the checkpoint part {path}: {error}") from error
    return Part(file=path.name, sha256=digest, num_bytes=size, units=copy.units)


def seal(folder: Path, manifest: Manifest) -> None:
    """Make the parts in `folder` a checkpoint, atomically.

    Raises:
        CheckpointError: parts are missing a unit, or the manifest cannot be written.
    """
    _check_complete(folder, manifest)
    fresh = folder / f"{MANIFEST}.new"
    try:
        with fresh.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(folder / MANIFEST)
        for entries in (folder, folder.parent):
            descriptor = os.open(entries, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / MANIFEST}: {error}") from error


def read_manifest(folder: Path, *, verify: bool = False) -> Manifest:
    """The manifest of the checkpoint in `folder`; `verify` reads and checks every part as well.

    Raises:
        CheckpointError: there is none, or it cannot be trusted; says which file and why.
    """
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise CheckpointError(f"no checkpoint in {folder}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is of another version of Counterpoise: {error}") from error
    except msgspec.DecodeError as error:
        raise CheckpointDamaged(f"{path} is damaged: {error}") from error
    if manifest.format != 1:
        raise CheckpointError(f"{path} has format {manifest.format}; this version reads format 1")
    samples = manifest.applied_step * manifest.train.global_batch
    if manifest.next_sample not in (0, samples):
        raise CheckpointDamaged(
            f"{path} is damaged: the next sample is {manifest.next_sample}, but "
            f"{manifest.applied_step} steps have taken {samples}"
        )
    _check_complete(folder, manifest)
    if verify:
        verify_parts(folder, manifest, 0, 1)
    return manifest


def verify_parts(folder: Path, manifest: Manifest, rank: int, num_ranks: int) -> None:
    """Check every `num_ranks`-th part from number `rank` on: among them the ranks check all.

    Raises:
        CheckpointError: one cannot be read; `CheckpointDamaged`: it is not what was written.
    """
    for part in manifest.parts[rank::num_ranks]:
        _verify(folder / part.file, part)


def load_units(folder: Path, manifest: Manifest, state: State) -> None:
    """Fill `state` (parameters and moments of all it holds) from a checkpoint.

    Raises:
        CheckpointError: a part is damaged or does not fit.
    """
    for part in manifest.parts:
        with _open(folder / part.file) as file:
            for number, parameter in enumerate(state.layout.parameters):
                held = state.layout.held[parameter.family]
                there = {unit: row for row, unit in enumerate(part.units[parameter.family])}
                wanted = [(row, there[unit]) for row, unit in enumerate(held) if unit in there]
                if not wanted:
                    continue
                stored = file.get_tensor(f"{parameter.name}.{parameter.layer}")
                ours = torch.tensor([row for row, _ in wanted])
                theirs = torch.tensor([row for _, row in wanted])
                for index, flat in enumerate(state.moving()):
                    rows = state.rows(flat, number)
                    values = stored[index].index_select(0, theirs).to(rows)
                    rows.index_copy_(0, ours.to(rows.device), values)


def read_full(folder: Path, model: ModelConfig) -> tuple[int, dict[str, torch.Tensor]]:
    """Applied steps and every whole parameter, unit-major `(units, *row)`, by `name.layer`.

    Raises:
        CheckpointError: it is no checkpoint of `model`.
    """
    manifest = read_manifest(folder, verify=True)
    if manifest.model != model:
        raise CheckpointError(f"the checkpoint in {folder} is of another model")
    full = {
        f"{p.name}.{p.layer}": torch.zeros(num_units(model, p.family), *p.row)
        for p in parameters(model)
    }
    for part in manifest.parts:
        with _open(folder / part.file) as file:
            for p in parameters(model):
                units = part.units[p.family]
                if units:
                    key = f"{p.name}.{p.layer}"
                    full[key][torch.tensor(units)] = file.get_tensor(key)[0]
    return manifest.applied_step, full


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint part {path} cannot be read: {error}") from error


def _verify(path: Path, part: Part) -> None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"the checkpoint part {path} cannot be read: {error}") from error
    if digest != part.sha256:
        raise CheckpointDamaged(f"the checkpoint part {path} is damaged: its checksum differs")


def _check_complete(folder: Path, manifest: Manifest) -> None:
    """Every unit of every family must be in exactly one part, and every part in its place."""
    for family in {p.family for p in parameters(manifest.model)}:
        found = sorted(unit for part in manifest.parts for unit in part.units[family])
        if found != list(range(num_units(manifest.model, family))):
            raise CheckpointDamaged(f"the checkpoint in {folder} has not every {family} unit once")
    for part in manifest.parts:
        path = folder / part.file
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise CheckpointDamaged(
                f"the checkpoint part {path} is missing; all hosts must see one checkpoint folder"
            ) from error
        except OSError as error:
            raise CheckpointError(f"the checkpoint part {path} cannot be read: {error}") from error
        if size != part.num_bytes:
            raise CheckpointDamaged(
                f"the checkpoint part {path} is damaged: it has {size} bytes, not {part.num_bytes}"
            )


def checkpoints_by_age(homes: Sequence[Path]) -> list[Path]:
    """The folders among `homes` that are sealed, the one whose manifest was written last first."""
    found = []
    for home in homes:
        # A run that goes on lets go of old ones meanwhile.
        with contextlib.suppress(OSError):
            found.append(((home / MANIFEST).stat().st_mtime_ns, home))
    return [home for _, home in sorted(found, reverse=True)]


def newest_checkpoint(homes: Sequence[Path]) -> Path | None:
    """The checkpoint folder among `homes` whose manifest was written last."""
    return next(iter(checkpoints_by_age(homes)), None)


def prune(folder: Path, keep: int) -> None:
    """Once the checkpoint in `folder` is sealed: leave it and the newest others, `keep` in all.

    What was never sealed goes too, unless it is of a later step: that one is being written.
    """
    others = [home for home in folder.parent.glob("step-*") if home != folder]
    kept = checkpoints_by_age(others)[: keep - 1]
    for old in others:
        later = _step_of(old) >= _step_of(folder) and not (old / MANIFEST).exists()
        if old in kept or later:
            continue
        # Its seal goes first: half a folder is no checkpoint. What cannot go may stay.
        with contextlib.suppress(OSError):
            (old / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(old)


def set_aside(folder: Path) -> Path | None:
    """Rename a damaged checkpoint, so that nobody takes it for one; None if that cannot be."""
    aside = folder.with_name(f"damaged-{folder.name}")
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"damaged-{folder.name}-{number}")
    try:
        folder.rename(aside)
    except OSError:
        return None
    return aside


def _step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    found = re.match(r"step-(\d+)", folder.name)
    return int(found[1]) if found else 0
