"""Where a new run begins: at the newest checkpoint that its configuration continues, or afresh."""

from __future__ import annotations

from pathlib import Path

import msgspec

from runtime.config import Config, TrainConfig
from runtime.engine.checkpoint import CheckpointError, checkpoints_by_age, read_manifest
from runtime.plan.manifest import Manifest, Start

# Settings of TrainConfig that do not change what a step computes.
_FREE = frozenset(
    {
        "steps", "micro_batch", "bucket_mb", "state_hash_every", "sync", "fractional", "non_finite",
        "max_skipped", "activation_checkpointing",
    }
)  # fmt: skip


def find_start(config: Config, runs: Path) -> tuple[Start, str]:
    """Where to begin, and a word on it for the journal ("" when there is nothing to say).

    runs: folder of all runs' folders. A damaged checkpoint is passed over for the next older
    one; one of another configuration is left alone. The word says which and why.
    """
    damaged: list[str] = []
    for folder in checkpoints_by_age([*runs.glob("*/checkpoint/step-*")]):
        try:
            manifest = read_manifest(folder, verify=True)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        start, word = _from_manifest(config, folder, manifest)
        return start, "; ".join([word, *damaged])
    return Start(), "; ".join(["began afresh", *damaged]) if damaged else ""


def _from_manifest(config: Config, folder: Path, manifest: Manifest) -> tuple[Start, str]:
    differing = _differing(config, manifest.model, manifest.train)
    if differing:
        return Start(), (
            f"began afresh: the checkpoint of run {manifest.run} has other settings "
            f"({', '.join(differing)})"
        )
    start = Start(checkpoint=str(folder), run=manifest.run, step=manifest.applied_step)
    if config.train.steps and start.step >= config.train.steps:
        return Start(), f"began afresh: run {manifest.run} has done all {config.train.steps} steps"
    return start, f"continues run {manifest.run} at step {start.step}"


def _differing(config: Config, model: object, train: TrainConfig) -> list[str]:
    """Dotted names of the settings that differ."""
    found = ["model"] if config.model != model else []
    ours, theirs = msgspec.structs.asdict(config.train), msgspec.structs.asdict(train)
    return found + [
        f"train.{name}" for name in ours if name not in _FREE and ours[name] != theirs[name]
    ]
