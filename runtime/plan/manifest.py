"""What a checkpoint says of itself: which part holds which units, for which run and step. Pure."""

from __future__ import annotations

import msgspec

from runtime.config import ModelConfig, TrainConfig

Held = dict[str, tuple[int, ...]]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run begins: at a checkpoint of another run, or ("", 0) at the config's seed."""

    checkpoint: str = ""
    run: str = ""
    step: int = 0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint: which units it has (ascending, per family), and its digest."""

    file: str
    sha256: str
    num_bytes: int
    units: Held


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What makes parts a checkpoint. applied_step: optimizer steps its state has seen.

    train: the settings that decide the trajectory; a run that continues must have the same, and
        have the same `checkpoint.start`, which is `origin`. Learning rate and all randomness are
        functions of its seed and of the step.
    next_sample: the first sample that has not been trained on, 0 where it was not written down.
    ledger: seconds of the run by bucket when it was sealed.
    """

    run: str
    applied_step: int
    model: ModelConfig
    train: TrainConfig
    parts: tuple[Part, ...]
    origin: str = ""
    next_sample: int = 0
    ledger: dict[str, float] = {}
    format: int = 1
