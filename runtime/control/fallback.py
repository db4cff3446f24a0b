"""Back to a checkpoint: the state is lost everywhere, or the run is restarted. Pure.

The steps since the checkpoint are lost and run again, with the same samples: the run's trajectory
stays what it was. While no GPU lives, the run waits for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.control import messages as m
from runtime.control.change import Change
from runtime.control.instructions import FindCheckpoint, Finish, Record
from runtime.control.situations import fit_spares
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
    """Brings one run back. waits: why nothing trains, "" when it does. distrusted: why the present
    beginning is none, "" when it is."""

    def __init__(self) -> None:
        self.waits = ""
        self.distrusted = ""
        self._why = ""
        # Whether it is known what to go on from, and with which GPUs that was tried in vain.
        self._ready = False
        self._tried: frozenset[str] = frozenset()
        self._began_at = 0.0

    def begin(self, coordinator: Coordinator, why: str, now: float, *, lost: bool) -> None:
        """The next generation cannot be formed of what lives. lost: some of the state is gone."""
        self._why, self._tried, self.distrusted = why, coordinator.fleet.living, ""
        if coordinator.phase != "restoring":
            self._began_at = now
            coordinator.set_phase("restoring", now)
        generations = coordinator.generations
        # Where the state lives but has no room, whoever is brought back may make some.
        lives = not lost and generations.lives_in(coordinator.fleet)
        self._ready = lives or generations.previous is None
        if not self._ready:
            coordinator.outgoing.put(FindCheckpoint())

    def refused(self, coordinator: Coordinator, told: m.CheckpointRefused, now: float) -> None:
        """What the generation begins at cannot be trusted after all: look for another."""
        if told.generation == coordinator.number and coordinator.phase in ("entering", "leaving"):
            self.distrusted = f"{told.gpu}: {told.reason}"
            coordinator.retry_generation(self.distrusted, now)

    def restart(self, coordinator: Coordinator, now: float) -> None:
        """The ranks' state at this boundary is on disk, if all went well: look, then replace
        every process."""
        self._why, self._tried, self._ready = coordinator.change.cause, frozenset(), False
        self._began_at = coordinator.change.began_at
        coordinator.set_phase("restoring", now)
        coordinator.outgoing.put(FindCheckpoint())

    def found(self, coordinator: Coordinator, start: Start | None, word: str, now: float) -> None:
        """The newest checkpoint that can be trusted, None for none; a word on those passed over."""
        if coordinator.phase != "restoring":
            return
        change = coordinator.change
        if change.restart and (start is None or start.step != coordinator.progress.committed):
            # Nothing is lost yet, so nothing shall be.
            why = word or "no checkpoint could be written of the step it was to begin at"
            coordinator.call_off(why, now)
        elif start is None:
            reason = "; ".join(filter(None, [self._why, word, HOW_TO_AVOID]))
            coordinator.end(Finish(status="failed", reason=reason), now)
        else:
            self._roll_back(coordinator, start, word, now)
            self._ready, self._tried = True, frozenset()
            if change.restart:
                self._replace_all(coordinator, now)
            self._go_on(coordinator, now)

    def _replace_all(self, coordinator: Coordinator, now: float) -> None:
        for gpu in sorted(coordinator.fleet.living):
            coordinator.fleet.replace(gpu, now)
            coordinator.roll_call.start_afresh(coordinator, gpu)

    def _roll_back(self, coordinator: Coordinator, start: Start, word: str, now: float) -> None:
        committed = coordinator.progress.committed
        if start.step > committed:
            untold = f"steps {committed} to {start.step - 1} were never told"
            coordinator.event("steps_untold", "warning", untold, now)
        change = coordinator.change
        if not change.restart:
            cause = f"back to the checkpoint at step {start.step}: {self._why}"
            change = Change(cause=cause, planned=False, began_at=self._began_at)
            text = f"The run goes {cause}; {_lost_words(start.step, committed)}."
            text += f" ({word})" if word else ""
            coordinator.event("run_rolled_back", "critical", text, now)
        else:
            text = f"All processes are replaced and begin at step {start.step}: {change.cause}."
            coordinator.event("run_restarted", "info", text, now)
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
        coordinator.start_again(start, change)

    def recall(self, coordinator: Coordinator, now: float) -> None:
        """An earlier controller had rolled the run back and did not come to a generation."""
        self._ready = True
        coordinator.set_phase("restoring", now)
        coordinator.progress.paused(coordinator.progress.ledger.marked_at, now)
        self.waits = "the controller restarted"

    def tick(self, coordinator: Coordinator, now: float) -> None:
        """Go on as soon as there are GPUs to go on with."""
        if coordinator.phase != "restoring":
            return
        if coordinator.is_finishing:
            coordinator.end_as_asked(now)
        elif self._ready:
            self._go_on(coordinator, now)

    def _go_on(self, coordinator: Coordinator, now: float) -> None:
        patience_s = coordinator.config.control.join_deadline_s
        starting = [view for view in coordinator.fleet if view.status == "starting"]
        if any(now - view.since <= patience_s for view in starting):
            return  # Those that come together start together.
        for view in starting:
            coordinator.lose(view.gpu, now, now, "it did not come up in time")
        living = coordinator.fleet.living
        self._tried &= living  # Who died and came back since is another worker.
        if living - self._tried:
            if self.waits:
                coordinator.progress.pause_goes_on(now)
                coordinator.progress.leaving(now)
            self.waits = ""
            if coordinator.generations.previous is None and not coordinator.change.proposal:
                _seat_spares(coordinator, now)
            coordinator.form_next(now)
        elif living:
            self._wait(coordinator, self._why, now)
        elif coordinator.generations.previous is not None:
            self.begin(coordinator, f"state lost: {coordinator.last_words}", now, lost=True)
        else:
            waits = "no GPU is left: bring one back (counterpoise fault repair RACK/SLOT) and the "
            waits += f"run goes on from step {coordinator.start.step}"
            self._wait(coordinator, waits, now)

    def _wait(self, coordinator: Coordinator, waits: str, now: float) -> None:
        progress = coordinator.progress
        if not self.waits:
            progress.paused(now, now)
        elif now - progress.ledger.marked_at >= TOLD_EVERY_S:
            progress.pause_goes_on(now)
        self.waits = waits


def _seat_spares(coordinator: Coordinator, now: float) -> None:
    """Everybody reads the checkpoint now: spares fill dead slots without holding anybody up."""
    fleet = coordinator.fleet
    for replica in range(len(coordinator.config.cluster.racks)):
        spares = list(fit_spares(coordinator, replica))
        seats = list(fleet.seats(replica))
        for slot in sorted(set(range(len(seats))) - set(fleet.alive(replica))):
            if spares:
                seats[slot] = spares.pop(0)
                words = f"{seats[slot]} takes the place of slot {slot} of replica {replica}"
                coordinator.event("spare_seated", "info", words, now, seats[slot])
        fleet.seat(replica, tuple(seats))


def _lost_words(step: int, committed: int) -> str:
    if step >= committed:
        return "no step is lost"
    which = f"step {step} is" if step == committed - 1 else f"steps {step} to {committed - 1} are"
    return f"{which} lost and run again"
