"""Which ranks hold the others up, and from when on they are stopped. Pure.

A rank is late by `step_deadline_s`: three steps, at least 2 s; control.step_deadline_s (or three
predicted steps) until the step time is known. Then whoever is silent or sits in its own computation
is stopped; who waits for others is not. If nobody is at fault the generation is formed anew. If
everybody is, it is the host that stands still, and stopping them would only end the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator

MIN_DEADLINE_S = 2.0
LEAVE_DEADLINE_S = 3.0
SILENT_S = 2.0
# Longer between two looks and it was we who stood still: nobody was silent, nobody was heard.
LULL_S = 1.0
# An order to stop a rank that is not obeyed by then will not be: its agent is gone or hangs.
OBEYED_S = 3.0
_WAITS = ("collective", "commit")


class Fence:
    """Looks at the members of the generation; call `look` several times a second."""

    def __init__(self) -> None:
        self._looked_at: float | None = None
        self._since = 0.0
        self._asked: dict[str, tuple[int, float]] = {}
        self._told_stalled = False

    def step_deadline_s(self, coordinator: Coordinator) -> float:
        """Longest time without a commit before somebody is to blame."""
        progress, plan = coordinator.progress, coordinator.plan
        configured = coordinator.config.control.step_deadline_s
        expected = progress.expected_step_s
        if expected > 0 and progress.formed:
            return max(MIN_DEADLINE_S, min(3 * expected, max(configured, 2 * expected)))
        training = sum(r.mode == "training" for r in plan.replicas) if plan is not None else 1
        shares = len(coordinator.config.cluster.racks) / max(1, training)
        return max(configured, 3 * progress.ideal_step_s * shares)

    def look(self, coordinator: Coordinator, now: float) -> None:
        """Stop who is late, if anybody is."""
        lull = self._looked_at is not None and now - self._looked_at > LULL_S
        self._looked_at = now
        if coordinator.phase not in ("entering", "training", "leaving"):
            self._asked.clear()
            return
        if lull:
            self._since = now
            for view in coordinator.fleet:
                view.pulse_at = max(view.pulse_at, now)
        self._give_up(coordinator, now)
        if coordinator.ended is not None:
            return
        step_s = self.step_deadline_s(coordinator)
        leaving = coordinator.phase == "leaving" and coordinator.change.aborts
        deadline = max(LEAVE_DEADLINE_S, step_s / 3) if leaving else step_s
        moved_at = max(coordinator.phase_at, coordinator.progress.last_commit_at)
        if now - moved_at < deadline:
            self._told_stalled = False
        if now - max(self._since, moved_at) < deadline:
            return
        if self._act(coordinator, deadline, now):
            self._since = now

    def _act(self, coordinator: Coordinator, deadline: float, now: float) -> bool:
        """False: nobody can be blamed yet; the next pulses may tell."""
        assert coordinator.plan is not None
        alive = [
            view
            for view in (coordinator.fleet[gpu] for gpu in coordinator.plan.members())
            if view.status == "alive"
        ]
        late = [view for view in alive if view.gpu not in coordinator.parked]
        guilty = [view for view in late if now - view.pulse_at > SILENT_S]
        # Whoever enters waits for the others, and looks the same if it hangs: an abort will tell.
        entering = coordinator.phase == "entering" or any(view.phase == "move" for view in late)
        if coordinator.phase == "leaving" and coordinator.change.aborts:
            guilty = late
        elif not guilty and not entering:
            # What is known to make it slow does not make it hung.
            guilty = [
                view
                for view in late
                if view.phase not in _WAITS and view.phase_age_s > deadline * view.slowness
            ]
        why = f"made no progress for {deadline:.1f} s"
        if not guilty:
            if entering or all(
                view.phase in _WAITS and view.phase_age_s > deadline for view in late
            ):
                coordinator.retry_generation(f"no step for {deadline:.1f} s, nobody at fault", now)
                return True
            return False
        if len(guilty) == len(alive):
            if not self._told_stalled:
                self._told_stalled = True
                why = f"all {len(alive)} ranks {why}: their host stands still"
                coordinator.tell_stalled(why, now)
        else:
            for view in guilty:
                self._asked.setdefault(view.gpu, (view.pid, now))
                coordinator.stop_rank(view.gpu, f"{view.gpu} {why} and was stopped", now)
        return True

    def _give_up(self, coordinator: Coordinator, now: float) -> None:
        for gpu, (pid, at) in list(self._asked.items()):
            view = coordinator.fleet[gpu]
            if view.status != "alive" or view.pid != pid:
                del self._asked[gpu]
            elif now - at > OBEYED_S:
                del self._asked[gpu]
                coordinator.give_up_rank(gpu, "it hung and its agent does not stop it", now)
