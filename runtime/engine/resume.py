"""Where a new run begins: at the newest checkpoint that its configuration continues, else at that
which the configuration names, else afresh."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from runtime.config import Config
from runtime.engine.checkpoint import (
    CheckpointDamaged,
    CheckpointError,
    checkpoints_by_age,
    read_manifest,
    set_aside,
)
from runtime.errors import UserError
from runtime.plan.manifest import Manifest, Start

# Settings of TrainConfig that do not change what a step computes.
_FREE = frozenset(
    {
        "steps", "micro_batch", "bucket_mb", "state_hash_every", "sync", "fractional", "non_finite",
        "max_skipped", "activation_checkpointing",
    }
)  # fmt: skip


class Beginning(NamedTuple):
    """Where to begin. word: on that, for the journal, "" when there is nothing to say. damaged: on
    checkpoints that were passed over, "" for none."""

    start: Start = Start()
    word: str = ""
    damaged: str = ""


AFRESH = Beginning()


def find_start(config: Config, runs: Path, *, fresh: bool = False) -> Beginning:
    """Where a new run begins.

    runs: folder of all runs' folders. fresh: go on from no run. A damaged checkpoint is set aside
    for the next older one; one of another configuration is left alone.

    Raises:
        UserError: the checkpoint that the configuration names cannot be begun with.
    """
    start, words, damaged = (Start(), [], []) if fresh else _own(config, runs)
    if not start.checkpoint and config.checkpoint.start:
        start = given_start(config)
        words.append(f"begins at step {start.step} of {start.checkpoint}")
    return Beginning(start, "; ".join(words), "; ".join(damaged))


def _own(config: Config, runs: Path) -> tuple[Start, list[str], list[str]]:
    """Where an earlier run with the same settings left off, words on that and on damaged ones."""
    found, damaged = _newest(checkpoints_by_age([*runs.glob("*/checkpoint/step-*")]))
    if found is None:
        return Start(), ["began afresh"] if damaged else [], damaged
    start, word = _from_manifest(config, *found)
    return start, [word], damaged


def _newest(folders: Iterable[Path]) -> tuple[tuple[Path, Manifest] | None, list[str]]:
    """The first of `folders` that can be trusted, and words on those before it: what is damaged
    will never be good again and is set aside."""
    words: list[str] = []
    for folder in folders:
        try:
            return (folder, read_manifest(folder, verify=True)), words
        except CheckpointDamaged as error:
            aside = set_aside(folder)
            words.append(f"{error}; " + (f"set aside as {aside}" if aside else "it stays there"))
        except CheckpointError as error:
            words.append(str(error))
    return None, words


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
    found, damaged = _newest(checkpoints_by_age([*run.glob("step-*")]))
    if found is None and start.checkpoint:
        folder = Path(start.checkpoint)
        try:
            found = folder, read_manifest(folder, verify=True)
        except CheckpointError as error:
            damaged.append(str(error))
    if found is None:
        return None, "; ".join(damaged)
    folder, manifest = found
    back = Start(checkpoint=str(folder), run=manifest.run, step=manifest.applied_step)
    return back, "; ".join(damaged)


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
