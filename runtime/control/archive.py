"""A run's files beside its journal: every plan, and the controller's memory. Written atomically."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from runtime.control.generations import KEPT_PLANS
from runtime.control.memory import Memory
from runtime.errors import UserError
from runtime.plan.generation import GenerationPlan


class Archive:
    """Reads and writes the files of one run.

    Args:
        home: folder of the run.
    """

    def __init__(self, home: Path) -> None:
        self._memory = home / "memory.json"
        self._plans = home / "plans"
        self._plans.mkdir(parents=True, exist_ok=True)
        self._written = b""

    @property
    def holds_a_run(self) -> bool:
        """An earlier controller left a run here."""
        return self._memory.exists()

    def save_plan(self, plan: GenerationPlan) -> None:
        """Keep a plan before any rank can act on it."""
        _write(self._plans / f"{plan.generation:08d}.json", msgspec.json.encode(plan))
        for old in sorted(self._plans.glob("*.json"))[:-KEPT_PLANS]:
            old.unlink(missing_ok=True)

    def save_memory(self, memory: Memory) -> None:
        data = msgspec.json.encode(memory)
        if data != self._written:
            _write(self._memory, data)
            self._written = data

    def load(self) -> tuple[Memory, dict[int, GenerationPlan]] | None:
        """What an earlier controller of this run left; None when there was none.

        Raises:
            UserError: a file is damaged; says which.
        """
        if not self.holds_a_run:
            return None
        path = self._memory
        try:
            memory = msgspec.json.decode(path.read_bytes(), type=Memory)
            plans = {}
            for path in sorted(self._plans.glob("*.json")):
                plan = msgspec.json.decode(path.read_bytes(), type=GenerationPlan)
                plans[plan.generation] = plan
        except (OSError, msgspec.DecodeError) as error:
            raise UserError(
                f"{path} cannot be read ({error}); the run cannot be taken over. "
                "Stop its agents and start a new run."
            ) from error
        return memory, plans


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
