"""The checkpoint at the end of a run or before a restart: every rank writes its part, then it is
sealed. Pure.

It holds up the end no longer than `checkpoint.write_deadline_s`: a rank that cannot write, dies or
says nothing costs the checkpoint at worst, and the journal says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.config import CheckpointConfig
from runtime.control import messages as m
from runtime.control.instructions import Finish
from runtime.control.sealing import seal_of
from runtime.plan.manifest import Part

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator


def late_words(config: CheckpointConfig) -> str:
    """Why a checkpoint is given up that takes too long, and what can be done."""
    return (
        f"not every rank wrote its part within {config.write_deadline_s:g} s "
        "(checkpoint.write_deadline_s)"
    )


class LastCheckpoint:
    """Ends or restarts a run once its state is on disk.

    Args:
        checkpoints: folder of the run's checkpoints; "" writes none.
    """

    def __init__(self, checkpoints: str) -> None:
        self._checkpoints = checkpoints
        self._folder = ""
        self._parts: dict[str, Part] = {}
        self._finish: Finish | None = None

    def begin(self, coordinator: Coordinator, finish: Finish | None, now: float) -> None:
        """All ranks have left the generation: have them write their parts, then end the run, or
        restart it when there is no `finish`."""
        progress = coordinator.progress
        self._finish = finish
        if not self._checkpoints or progress.committed == progress.start_step:
            self._go_on(coordinator, now)
            return
        self._parts = {}
        self._folder = f"{self._checkpoints}/step-{progress.committed:08d}"
        if finish is None:
            # The run goes on: it may come by this step again, in another shape.
            self._folder += f"-generation-{coordinator.number}"
        coordinator.set_phase("saving", now)
        if any(
            view.standing is None or view.standing.applied_step != progress.committed
            for view in coordinator.living_members()
        ):
            self._give_up(coordinator, "a failure left the ranks a step apart", now)
            return
        self.tell(coordinator, None)

    def tell(self, coordinator: Coordinator, host: str | None) -> None:
        """Order the ranks of one host, or of all, to write."""
        coordinator.order(m.Save(generation=coordinator.number, folder=self._folder), host)

    def saved(self, coordinator: Coordinator, saved: m.Saved, now: float) -> None:
        """A rank has written its part, or says why not."""
        if coordinator.phase != "saving" or saved.folder not in ("", self._folder):
            return
        if saved.part is None:
            self._give_up(coordinator, f"{saved.gpu}: {saved.error}", now)
            return
        self._parts[saved.gpu] = saved.part
        self.seal_when_complete(coordinator, now)

    def seal_when_complete(self, coordinator: Coordinator, now: float) -> None:
        """Whoever died meanwhile is not waited for: the others' parts may be all that is needed."""
        if not {view.gpu for view in coordinator.living_members()} <= set(self._parts):
            return
        coordinator.progress.ledger.spend("checkpointing", now)
        step = coordinator.progress.committed
        coordinator.outgoing.put(seal_of(coordinator, self._folder, step, self._parts, now))
        self._go_on(coordinator, now)

    def _go_on(self, coordinator: Coordinator, now: float) -> None:
        if self._finish is not None:
            coordinator.end(self._finish, now)
        else:
            coordinator.fallback.restart(coordinator, now)

    def tick(self, coordinator: Coordinator, now: float) -> None:
        config = coordinator.config.checkpoint
        late = now - coordinator.phase_at > config.write_deadline_s
        if coordinator.phase == "saving" and late:
            self._give_up(coordinator, late_words(config), now)

    def _give_up(self, coordinator: Coordinator, why: str, now: float) -> None:
        coordinator.event("checkpoint_failed", "critical", why, now)
        self._go_on(coordinator, now)
