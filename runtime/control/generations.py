"""The plans of a run: the present one, and those before it that a standing may refer to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from runtime.control.succession import Aim, Past, succeed
from runtime.plan.generation import GenerationPlan

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

    def recall(self, plans: Mapping[int, GenerationPlan]) -> None:
        """Go on with the plans an earlier controller published."""
        self.number, self._history = max(plans, default=0), dict(plans)
        self.plan = plans.get(self.number)

    def publish_next(
        self, coordinator: Coordinator, aims: Sequence[Aim]
    ) -> tuple[GenerationPlan, int]:
        """Make the next generation's plan the present one; returns it and the bytes that move.

        Raises:
            StateLost: some unit of the newest state has no holder among the members.
            PlanError: no replica trains.
        """
        progress = coordinator.progress
        plan, bytes_moved = succeed(
            coordinator.config,
            run=coordinator.run,
            number=self.number + 1,
            store=self.store,
            past=Past(
                history=self._history,
                previous=self.plan,
                standings={
                    view.gpu: view.standing
                    for view in coordinator.fleet
                    if view.standing is not None
                },
                committed_steps=progress.committed,
                start=coordinator.start,
                told_norm=progress.last.grad_norm if progress.last else None,
            ),
            aims=aims,
            planned=coordinator.change.planned,
        )
        self.number, self.plan = plan.generation, plan
        self._history[plan.generation] = plan
        for old in sorted(self._history)[:-KEPT_PLANS]:
            del self._history[old]
        return plan, bytes_moved
