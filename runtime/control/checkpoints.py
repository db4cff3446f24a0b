"""Checkpoints while a run trains: at which step, whose parts are on disk, when to seal. Pure.

A checkpoint is ordered ahead for a step that no rank has come to yet, so all copy at the same
boundary without a word between them. What fails costs that checkpoint, never the run: the journal
says so, and the next one comes in its turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from runtime.config import CheckpointConfig
from runtime.control import messages as m
from runtime.control.last_checkpoint import LastCheckpoint, late_words
from runtime.control.sealing import seal_of
from runtime.plan.manifest import Part

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator

# An order must reach every rank before the step it is for.
LEAD_S = 1.0


class CheckpointMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a restarted controller must know of the one under way; folder "" for none. Whose parts
    are on disk their ranks say again. begun_at: when the last one was ordered, 0.0 for never."""

    begun_at: float = 0.0
    generation: int = 0
    step: int = 0
    folder: str = ""
    members: tuple[str, ...] = ()


@dataclass
class _Pending:
    """A checkpoint that is ordered. reached_at: when its step was committed. stalled_s: what the
    copy held up training for, on the rank that took longest."""

    generation: int
    step: int
    folder: str
    members: frozenset[str]
    reached_at: float | None = None
    stalled_s: float = 0.0
    parts: dict[str, Part] = field(default_factory=dict)


class Checkpoints:
    """Orders and seals a run's checkpoints; `last` is the one at its end.

    Args:
        folder: of the run's checkpoints; "" writes none.
    """

    def __init__(self, folder: str, config: CheckpointConfig, now: float) -> None:
        self.last = LastCheckpoint(folder)
        self._folder = folder
        self._config = config
        self._begun_at = now
        self._pending: _Pending | None = None

    @property
    def obstacle(self) -> str:
        """Why none can be written, "" when they can."""
        return "" if self._folder else "this run has no folder for checkpoints"

    def memory(self) -> CheckpointMemory:
        one = self._pending
        if one is None:
            return CheckpointMemory(begun_at=self._begun_at)
        return CheckpointMemory(
            begun_at=self._begun_at,
            generation=one.generation,
            step=one.step,
            folder=one.folder,
            members=tuple(sorted(one.members)),
        )

    def recall(self, memory: CheckpointMemory) -> None:
        """Go on with what an earlier controller had ordered."""
        self._begun_at = memory.begun_at or self._begun_at
        if memory.folder:
            self._pending = _Pending(
                memory.generation, memory.step, memory.folder, frozenset(memory.members)
            )

    def tick(self, coordinator: Coordinator, now: float) -> None:
        """Look whether one is due, or one that was begun does not come to its end."""
        self.last.tick(coordinator, now)
        self._look_after(coordinator, now)
        progress = coordinator.progress
        if self._pending is None and coordinator.phase == "training" and progress.formed:
            self._order_next(coordinator, now)

    def tell(self, coordinator: Coordinator, host: str | None) -> None:
        """Order the ranks of one host, or of all, to copy and write."""
        pending = self._pending
        if pending is None:
            return
        if pending.generation == coordinator.number or pending.reached_at is not None:
            order = m.Save(generation=pending.generation, folder=pending.folder, step=pending.step)
            coordinator.order(order, host)

    def heard(
        self,
        coordinator: Coordinator,
        message: m.Copied | m.Saved | m.CheckpointRefused,
        now: float,
    ) -> None:
        """A rank has copied its part, or it is on disk, or one cannot be written or read."""
        pending = self._pending
        if isinstance(message, m.CheckpointRefused):
            coordinator.fallback.refused(coordinator, message, now)
        elif isinstance(message, m.Copied):
            if pending is not None and message.step == pending.step:
                coordinator.progress.ledger.stalled(message.seconds)
                pending.stalled_s = max(pending.stalled_s, message.seconds)
        elif pending is None or message.folder != pending.folder:
            self.last.saved(coordinator, message, now)
        elif message.part is None:
            self._give_up(coordinator, f"{message.gpu}: {message.error}", now)
        else:
            pending.parts[message.gpu] = message.part
            self._seal_when_complete(coordinator, pending, now)

    def _order_next(self, coordinator: Coordinator, now: float) -> None:
        progress = coordinator.progress
        if not self._folder or coordinator.plan is None or not progress.expected_step_s:
            return
        earliest = progress.committed + 2 + math.ceil(LEAD_S / progress.expected_step_s)
        steps = []
        if self._config.every_steps:
            steps.append(-(-earliest // self._config.every_steps) * self._config.every_steps)
        if self._config.every_s and now - self._begun_at >= self._config.every_s:
            steps.append(earliest)
        if not steps:
            return
        self._pending = _Pending(
            generation=coordinator.number,
            step=min(steps),
            # Parts of two generations must never meet in one folder.
            folder=f"{self._folder}/step-{min(steps):08d}-generation-{coordinator.number}",
            members=frozenset(coordinator.plan.members()),
        )
        self._begun_at = now
        self.tell(coordinator, None)

    def _look_after(self, coordinator: Coordinator, now: float) -> None:
        pending = self._pending
        if pending is None:
            return
        if pending.reached_at is None and coordinator.progress.committed >= pending.step:
            pending.reached_at = now
        if pending.reached_at is None:
            if pending.generation != coordinator.number:
                self._pending = None  # Its step belongs to another generation now.
        elif now - pending.reached_at > self._config.write_deadline_s:
            self._give_up(coordinator, late_words(self._config), now)
        elif pending.generation != coordinator.number and any(
            coordinator.fleet[gpu].status != "alive" for gpu in pending.members - set(pending.parts)
        ):
            self._give_up(coordinator, "a rank failed before its part was written", now)

    def _seal_when_complete(self, coordinator: Coordinator, pending: _Pending, now: float) -> None:
        if not pending.members <= set(pending.parts):
            return
        self._pending = None
        cost = f"training stood still {1000 * pending.stalled_s:.1f} ms for the copy"
        if pending.reached_at is not None:
            cost += f", all on disk {now - pending.reached_at:.1f} s later"
        coordinator.outgoing.put(
            seal_of(coordinator, pending.folder, pending.step, pending.parts, now, cost=cost)
        )

    def _give_up(self, coordinator: Coordinator, why: str, now: float) -> None:
        assert self._pending is not None
        step, self._pending = self._pending.step, None
        coordinator.event(
            "checkpoint_failed", "warning", f"no checkpoint at step {step}: {why}", now
        )
