"""Where a new run begins: at the newest checkpoint that its configuration continues, or afresh."""

from __future__ import annotations

from pathlib import Path

import msgspec

from runtime.config import Config, TrainConfig
from runtime.engine.checkpoint import CheckpointError, newest_checkpoint, read_manifest
from runtime.plan.manifest import Start

# Settings of TrainConfig that do not change what a step computes.
_FREE = frozenset({"steps", "micro_batch", "bucket_mb", "state_hash_every", "sync"})


def find_start(config: Config, runs: Path) -> tuple[Start, str]:
    """Where to begin, and a word on it for the journal ("" when there is nothing to say).

    runs: folder of all runs' folders. A checkpoint that is damaged or of another configuration is left
    alone, and the word says which and why.
    """
    folder = newest_checkpoint([*runs.glob("*/checkpoint/step-*")])
    if folder is None:
        return Start(), ""
    try:
        manifest = read_manifest(folder, verify=True)
    except CheckpointError as error:
        return Start(), f"began afresh: {error}"
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
