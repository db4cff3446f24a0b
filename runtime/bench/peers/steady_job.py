"""What the steady-state worker program is told, and what it answers: plain values."""

from __future__ import annotations

import msgspec

from runtime.config import Config


class SteadyJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure; port: of the store that rank 0 serves, on 127.0.0.1."""

    config: Config
    num_replicas: int
    degree: int
    port: int
    seconds: float
    steps: int
    result: str


class SteadyResult(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per step by program and round; losses of the first steps (mean over the batch's
    first replica) prove that all do the same work."""

    step_s: dict[str, list[float]]
    first_losses: dict[str, list[float]]
