"""The phases of a run, and why a generation is left. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal[
    "starting", "entering", "training", "leaving", "paused", "restoring", "saving", "ended"
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Change:
    """Why a generation is being left. proposal: id of the proposal that is being applied.
    at_once: planned, but the step at hand is dropped. restart: every process is replaced."""

    cause: str
    planned: bool
    began_at: float
    at_once: bool = False
    proposal: str = ""
    restart: bool = False

    @property
    def aborts(self) -> bool:
        """Whether ranks leave their collectives for it."""
        return self.at_once or not self.planned
