"""Where a new run begins: at the newest checkpoint that its configuration continues, else at that
which the configuration names, else afresh."""

from __future__ import annotations

from pathlib import Path

import msgspec

from runtime.config import Config
from runtime.engine.checkpoint import CheckpointError, checkpoints_by_age, read_manifest
from runtime.errors import UserError
from runtime.plan.manifest import Manifest, Start

# Settings of TrainConfig that do not change what a step computes.
_FREE = frozenset(
    {
        "steps", "micro_batch", "bucket_mb", "state_hash_every", "sync", "fractional", "non_finite",
        "max_skipped", "activation_checkpointing",
    }
)  # fmt: skip


def find_start(config: Config, runs: Path, *, fresh: bool = False) -> tuple[Start, str]:
    """Where to begin, and a word on it for the journal ("" when there is nothing to say).

    runs: folder of all runs' folders. fresh: go on from no run. A damaged checkpoint is passed over
    for the next older one; one of another configuration is left alone. The word says which and why.

    Raises:
        UserError: the checkpoint that the configuration names cannot be begun with.
    """
    start, words = (Start(), []) if fresh else _own(config, runs)
    if not start.checkpoint and config.checkpoint.start:
        start = given_start(config)
        words.append(f"begins at step {start.step} of {start.checkpoint}")
    return start, "; ".join(words)


def _own(config: Config, runs: Path) -> tuple[Start, list[str]]:
    """Where an earlier run with the same settings left off, and words on that."""
    damaged: list[str] = []
    for folder in checkpoints_by_age([*runs.glob("*/checkpoint/step-*")]):
        try:
            manifest = read_manifest(folder, verify=True)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        start, word = _from_manifest(config, folder, manifest)
        return start, [word, *damaged]
    return Start(), ["began afresh", *damaged] if damaged else []


def given_start(config: Config, *, verify: bool = True) -> Start:
    """The checkpoint that the configuration says to begin with; `verify` reads every part.

    Raises:
        UserError: it cannot be trusted, or is of another model.
    """
    folder = Path(config.checkpoint.start)
    try:
        manifest = read_manifest(folder, verify=verify)
    except CheckpointError as error:
        raise UserError(f"`checkpoint.start`: {error}") from error
    ours, theirs = (msgspec.structs.asdict(m) for m in (config.model, manifest.model))
    if differing := [f"{k} is {theirs[k]}, not {ours[k]}" for k in ours if ours[k] != theirs[k]]:
        raise UserError(
            f"`checkpoint.start`: {folder} is of another model than [model]: {'; '.join(differing)}"
        )
    return Start(checkpoint=str(folder.resolve()), run=manifest.run, step=manifest.applied_step)


def find_fallback(run: Path, start: Start) -> tuple[Start | None, str]:
    """The newest checkpoint in a run's own folder `run` that can be trusted, else the one it began
    at; None without any. Beside it, a word on those that are damaged, "" for none."""
    damaged: list[str] = []
    began_at = [Path(start.checkpoint)] if start.checkpoint else []
    for folder in [*checkpoints_by_age([*run.glob("step-*")]), *began_at]:
        try:
            manifest = read_manifest(folder, verify=True)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        found = Start(checkpoint=str(folder), run=manifest.run, step=manifest.applied_step)
        return found, "; ".join(damaged)
    return None, "; ".join(damaged)


def _from_manifest(config: Config, folder: Path, manifest: Manifest) -> tuple[Start, str]:
    if differing := _differing(config, manifest):
        return Start(), (
            f"began afresh: the checkpoint of run {manifest.run} has other settings "
            f"({', '.join(differing)})"
        )
    start = Start(checkpoint=str(folder), run=manifest.run, step=manifest.applied_step)
    if config.train.steps and start.step >= config.train.steps:
        return Start(), f"began afresh: run {manifest.run} has done all {config.train.steps} steps"
    return start, f"continues run {manifest.run} at step {start.step}"


def _differing(config: Config, manifest: Manifest) -> list[str]:
    """Dotted names of the settings that differ."""
    found = ["model"] if config.model != manifest.model else []
    found += ["checkpoint.start"] if config.checkpoint.start != manifest.origin else []
    ours, theirs = (msgspec.structs.asdict(train) for train in (config.train, manifest.train))
    return found + [
        f"train.{name}" for name in ours if name not in _FREE and ours[name] != theirs[name]
    ]
