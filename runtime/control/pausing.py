"""Pause and resume: the run stands still between two steps, its processes live on. Pure.

A pause leaves the generation like any planned change, but forms no next one. What fails or comes
back meanwhile is taken note of, and the generation that resumes is made of what is there then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.control.change import Change
from runtime.control.succession import aims_of

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator

# How often the journal is told that the pause goes on.
TOLD_EVERY_S = 10.0


class Pausing:
    """Whether the run shall stand still. why: by whom and for what; "" when it shall run."""

    def __init__(self) -> None:
        self.why = ""

    def obstacle(self, coordinator: Coordinator, *, pause: bool) -> str:
        """Why the run cannot be paused (or resumed) now, "" if it can."""
        if coordinator.plan is None:
            return "the run is still starting"
        if coordinator.is_finishing:
            return "the run is ending"
        if coordinator.phase == "restoring":
            return "the run goes back to a checkpoint"
        if pause and self.why:
            return f"the run is {self.why} already"
        return "" if pause or self.why else "the run is not paused"

    def pause(self, coordinator: Coordinator, why: str, now: float) -> None:
        """Stand still at the next step boundary. why: "paused by ada: inspection"."""
        assert coordinator.plan is not None
        self.why = why
        coordinator.aims = aims_of(coordinator.plan)
        coordinator.leave(Change(cause=why, planned=True, began_at=now), now)

    def begin(self, coordinator: Coordinator, now: float) -> None:
        """Every rank has left: the pause counts from the last step on."""
        progress = coordinator.progress
        coordinator.set_phase("paused", now)
        progress.paused(progress.last_commit_at, now)
        kept = f"The run is {self.why}. All processes live on and keep their state."
        coordinator.event("run_paused", "info", kept, now)

    def resume(self, coordinator: Coordinator, why: str, now: float) -> None:
        """Go on. why: "resumed by ada"."""
        self.why = ""
        # Ranks that are on their way out still go on to the next generation at once.
        if coordinator.phase == "paused":
            coordinator.event("run_resumed", "info", f"The run is {why}.", now)
            self.lift(coordinator, why, now)

    def lift(self, coordinator: Coordinator, why: str, now: float) -> None:
        """The pause is over. Where a rank is gone, or not known to stand where the others do, all
        say once more where they stand, and form a generation."""
        assert coordinator.plan is not None
        self.why = ""
        coordinator.progress.pause_goes_on(now)
        members = [coordinator.fleet[gpu] for gpu in coordinator.plan.members()]
        together = all(
            view.standing is not None
            and view.standing.layout_generation == coordinator.number
            and view.standing.applied_step == coordinator.progress.committed
            for view in members
        )
        change = Change(cause=why, planned=True, at_once=not together, began_at=now)
        coordinator.leave(change, now)

    def recall(self, coordinator: Coordinator, why: str, now: float, *, still: bool) -> None:
        """Go on as an earlier controller left it. still: every rank had left already."""
        self.why = why
        if still:
            coordinator.set_phase("paused", now)
            coordinator.progress.paused(coordinator.progress.ledger.marked_at, now)

    def tick(self, coordinator: Coordinator, now: float) -> None:
        """Let the journal's clock go on: a run at rest must not look like a dead one."""
        progress = coordinator.progress
        if coordinator.phase == "paused" and now - progress.ledger.marked_at >= TOLD_EVERY_S:
            progress.pause_goes_on(now)
