"""The plans of a run: the present one, and those before it that a standing may refer to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from runtime.control.fleet import Fleet
from runtime.control.succession import Aim, Past, StateLost, succeed
from runtime.plan.generation import GenerationPlan, Standing

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator

KEPT_PLANS = 16


class Generations:
    """Owns the number and the plan of the generation of one run.

    Args:
        store: (host, port) of the TCPStore for rendezvous.
    """

    def __init__(self, store: tuple[str, int]) -> None:
        self.store = store
        self.number = 0
        self.plan: GenerationPlan | None = None
        self._history: dict[int, GenerationPlan] = {}
        self._distrusted: frozenset[str] = frozenset()

    def distrust(self, gpus: Iterable[str]) -> None:
        """Let these GPUs come empty to the next generation, if others hold all they do."""
        self._distrusted |= frozenset(gpus)

    @property
    def previous(self) -> GenerationPlan | None:
        """The plan whose state lives on in the ranks; None when the next one begins afresh."""
        return self.plan if self._history else None

    def recall(self, plans: Mapping[int, GenerationPlan], *, lost_up_to: int = 0) -> None:
        """Go on with the plans an earlier controller published; the state of those up to
        `lost_up_to` counts no more."""
        self.number = max(plans, default=0)
        self.plan = plans.get(self.number)
        self._history = {number: plan for number, plan in plans.items() if number > lost_up_to}

    def lives_in(self, fleet: Fleet) -> bool:
        """Whether some worker holds state of this run."""
        standings = [view.standing for view in fleet if view.standing is not None]
        return any(standing.layout_generation in self._history for standing in standings)

    def forget(self) -> None:
        """What the ranks hold counts no more: the run goes back to a checkpoint."""
        self._history.clear()

    def publish_next(
        self, coordinator: Coordinator, aims: Sequence[Aim]
    ) -> tuple[GenerationPlan, int]:
        """Make the next generation's plan the present one; returns it and the bytes that move.

        Raises:
            StateLost: some unit of the newest state has no holder among the members, or the
                checkpoint to begin at cannot be trusted.
            PlanError: no replica trains.
        """
        if coordinator.fallback.distrusted:
            raise StateLost(coordinator.fallback.distrusted)
        standings = {v.gpu: v.standing for v in coordinator.fleet if v.standing is not None}
        trusted = {gpu: one for gpu, one in standings.items() if gpu not in self._distrusted}
        try:
            plan, bytes_moved = self._succeed(coordinator, aims, trusted)
        except StateLost:
            if len(trusted) == len(standings):
                raise
            plan, bytes_moved = self._succeed(coordinator, aims, standings)
        self._distrusted = frozenset()
        self.number, self.plan = plan.generation, plan
        self._history[plan.generation] = plan
        for old in sorted(self._history)[:-KEPT_PLANS]:
            del self._history[old]
        return plan, bytes_moved

    def _succeed(
        self, coordinator: Coordinator, aims: Sequence[Aim], standings: Mapping[str, Standing]
    ) -> tuple[GenerationPlan, int]:
        progress = coordinator.progress
        return succeed(
            coordinator.config,
            run=coordinator.run,
            number=self.number + 1,
            store=self.store,
            past=Past(
                history=self._history,
                previous=self.previous,
                standings=standings,
                committed_steps=progress.committed,
                seats=[coordinator.fleet.seats(aim.replica) for aim in aims],
                start=coordinator.start,
                told_norm=progress.told_norm,
            ),
            aims=aims,
            planned=coordinator.change.planned,
        )
