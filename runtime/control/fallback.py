"""Back to a checkpoint: the state is lost everywhere, or no GPU is left. Pure.

The steps since the checkpoint are lost and run again, with the same samples: the run's trajectory
stays what it was. While no GPU lives, the run waits for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.control.change import Change
from runtime.control.instructions import FindCheckpoint, Finish, Record
from runtime.plan.manifest import Start
from storage.records import RunRolledBack

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator

# How often the journal is told that the run still waits.
TOLD_EVERY_S = 10.0
HOW_TO_AVOID = (
    "the run has no checkpoint to go back to; set checkpoint.every_steps or checkpoint.every_s in "
    "the config, and the next such loss costs only the steps since the last one"
)


class Fallback:
    """Brings one run back. waits: why nothing trains, "" when it does."""

    def __init__(self) -> None:
        self.waits = ""
        self._why = ""
        self._found = False
        self._began_at = 0.0

    def begin(self, coordinator: Coordinator, why: str, now: float) -> None:
        """The next generation cannot be formed from what lives."""
        self._why, self._found, self._began_at = why, False, now
        coordinator.set_phase("restoring", now)
        coordinator.outgoing.put(FindCheckpoint())

    def found(self, coordinator: Coordinator, start: Start | None, word: str, now: float) -> None:
        """The newest checkpoint that can be trusted, None for none; a word on those passed over."""
        if coordinator.phase != "restoring":
            return
        if start is None:
            reason = "; ".join(filter(None, [self._why, word, HOW_TO_AVOID]))
            coordinator.end(Finish(status="failed", reason=reason), now)
            return
        self._roll_back(coordinator, start, word, now)
        self._go_on(coordinator, now)

    def _roll_back(self, coordinator: Coordinator, start: Start, word: str, now: float) -> None:
        committed = coordinator.progress.committed
        last = committed - 1
        lost = f"steps {start.step} to {last} are" if last > start.step else f"step {last} is"
        lost = f"{lost} lost and run again" if committed > start.step else "no step is lost"
        cause = f"back to the checkpoint at step {start.step}: {self._why}"
        passed_over = f" ({word})" if word else ""
        text = f"The run goes {cause}; {lost}.{passed_over}"
        coordinator.outgoing.put(
            Record(
                entry=RunRolledBack(
                    seq=0,
                    at=now,
                    run=coordinator.run,
                    generation=coordinator.number,
                    step=start.step,
                    committed=committed,
                    checkpoint=start.checkpoint,
                    reason=self._why,
                )
            )
        )
        coordinator.event("run_rolled_back", "critical", text, now)
        change = Change(cause=cause, planned=False, began_at=self._began_at)
        coordinator.start_again(start, change)

    def recall(self, coordinator: Coordinator, now: float) -> None:
        """An earlier controller had rolled the run back and did not come to a generation."""
        self._found = True
        coordinator.set_phase("restoring", now)
        coordinator.progress.paused(coordinator.progress.ledger.marked_at, now)
        self.waits = "the controller restarted"

    def tick(self, coordinator: Coordinator, now: float) -> None:
        """Go on as soon as there is a GPU to go on with."""
        if coordinator.phase != "restoring":
            return
        if coordinator.is_finishing:
            coordinator.end_as_asked(now)
        elif self._found:
            self._go_on(coordinator, now)

    def _go_on(self, coordinator: Coordinator, now: float) -> None:
        self._found = True
        views = list(coordinator.fleet)
        late = now - coordinator.phase_at > coordinator.config.control.join_deadline_s
        coming = any(view.status == "starting" for view in views)
        if any(view.status == "alive" for view in views) and (late or not coming):
            if self.waits:
                coordinator.progress.pause_goes_on(now)
                coordinator.progress.leaving(now)
            self.waits = ""
            coordinator.form_next(now)
            return
        progress = coordinator.progress
        if not self.waits:
            progress.paused(now, now)
        elif now - progress.ledger.marked_at >= TOLD_EVERY_S:
            progress.pause_goes_on(now)
        self.waits = (
            "GPUs are being brought back"
            if coming
            else "no GPU is left: bring one back (counterpoise fault repair RACK/SLOT) and the run "
            f"goes on from step {coordinator.start.step}"
        )
