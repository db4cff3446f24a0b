"""What a step says of its own numbers, and what is done about it. Pure.

Values that are not finite: told with place and samples; too many such steps in a row end the run.
Holders of a unit that differ: where a majority tells who is odd, those fetch their state anew at
the next step boundary, as if they had lost it; where none does, a person must say who is wrong.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from runtime.config import ModelConfig
from runtime.control import messages as m
from runtime.control.change import Change
from runtime.layout.units import held_units
from runtime.plan.generation import NOT_FINITE, GenerationPlan
from storage.records import Severity

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator


class Soundness:
    """Looks at the steps of one run."""

    def __init__(self) -> None:
        # GPUs whose trouble was told and is not over yet.
        self._skipped: tuple[str, ...] = ()
        self._refetching: tuple[str, ...] = ()

    def look(
        self, coordinator: Coordinator, plan: GenerationPlan, done: m.StepDone, now: float
    ) -> None:
        """Look at a committed step's own word on its numbers."""
        if done.grad_norm != NOT_FINITE:
            self._tell_recovered(coordinator, f"step {done.step} is finite again", now)
        if done.not_finite is not None:
            self._tell_not_finite(coordinator, plan, done, done.not_finite, now)
        if done.difference is not None:
            self._tell_difference(coordinator, plan, done, done.difference, now)

    def formed(self, coordinator: Coordinator, now: float) -> None:
        """A generation committed its first step."""
        gpus, self._refetching = self._refetching, ()
        for gpu in gpus:
            text = f"{gpu} has fetched its state anew from the others"
            coordinator.event("gpu_recovered", "info", text, now, gpu)

    def refused(self, coordinator: Coordinator, told: m.StepRefused, now: float) -> None:
        """`train.non_finite` is "stop": all ranks have left before a step that is not finite."""
        plan = coordinator.plan
        if plan is None or told.generation != plan.generation or coordinator.is_finishing:
            return
        what = f"step {told.step} is not finite, twice: first {_place(told.seen)}"
        _event(coordinator, plan, "step_not_finite", "critical", what, told.step, told.seen, now)
        coordinator.finish(
            "failed",
            f"{what}. Nothing of it was applied. Look at its samples and GPUs, or set "
            'train.non_finite = "skip" and start again: it goes on from the checkpoint of '
            f"{told.step} steps",
            now,
        )

    def _tell_recovered(self, coordinator: Coordinator, text: str, now: float) -> None:
        gpus, self._skipped = self._skipped, ()
        for gpu in gpus:
            coordinator.event("gpu_recovered", "info", text, now, gpu)

    def _tell_not_finite(
        self,
        coordinator: Coordinator,
        plan: GenerationPlan,
        done: m.StepDone,
        seen: m.NotFiniteSeen,
        now: float,
    ) -> None:
        place = _place(seen)
        if done.grad_norm != NOT_FINITE:
            text = f"step {done.step} was not finite ({place}), and was when it was run again"
            _event(coordinator, plan, "step_run_again", "warning", text, done.step, seen, now)
            self._tell_recovered(coordinator, f"step {done.step} is finite", now)
            return
        text = f"step {done.step} is not finite and was skipped on all ranks: first {place}"
        _event(coordinator, plan, "step_skipped", "critical", text, done.step, seen, now)
        self._skipped = tuple(dict.fromkeys([*self._skipped, *seen.gpus[:1]]))
        limit, skipped = coordinator.config.train.max_skipped, coordinator.progress.num_skipped
        if skipped > limit and not coordinator.is_finishing:
            reason = (
                f"{skipped} steps in a row are not finite (train.max_skipped is {limit}), the last "
                f"first {place}: start again from an older checkpoint, with a smaller train.lr"
            )
            coordinator.finish("failed", reason, now)

    def _tell_difference(
        self,
        coordinator: Coordinator,
        plan: GenerationPlan,
        done: m.StepDone,
        found: m.StatesDiffer,
        now: float,
    ) -> None:
        every = coordinator.config.train.state_hash_every
        known = f"holders differ in {', '.join(found.units)} after step {done.step}"
        since = f"steps {max(0, done.step + 1 - every)} to {done.step} may have been trained so"
        clear = bool(found.odd) and not found.unsure
        mended = clear and _others_hold(coordinator.config.model, plan, found.odd)
        if mended:
            text = (
                f"{known}: {', '.join(found.odd)} against the others, and fetches it anew; {since}"
            )
        else:
            holders = ", ".join([*found.odd, *found.unsure])
            text = (
                f"{known}: {holders}; no majority says who is right. End the worker of the one you "
                "distrust, so that it fetches its state anew, or start from an older checkpoint; "
                f"{since}"
            )
        details = {
            "step": done.step,
            "units": list(found.units),
            "odd": list(found.odd),
            "unsure": list(found.unsure),
        }
        for gpu in found.odd or found.unsure[:1]:
            coordinator.event("states_differ", "critical", text, now, gpu, details=dict(details))
        if mended:
            self._refetching = found.odd
            coordinator.generations.distrust(found.odd)
            if coordinator.phase != "leaving":  # Then the boundary is near already.
                why = f"{', '.join(found.odd)} held another state than the others"
                coordinator.leave(Change(cause=why, planned=True, began_at=now), now)


def _place(seen: m.NotFiniteSeen) -> str:
    where = f" on {', '.join(seen.gpus[:4])}" if seen.gpus else ""
    more = f" and {len(seen.gpus) - 4} more" if len(seen.gpus) > 4 else ""
    return f"{seen.where}{where}{more}"


def _event(
    coordinator: Coordinator,
    plan: GenerationPlan,
    kind: str,
    severity: Severity,
    text: str,
    step: int,
    seen: m.NotFiniteSeen,
    now: float,
) -> None:
    """An event of the first GPU that saw it, with the samples it was about."""
    samples = {
        str(replica.replica): [first, first + replica.num_samples]
        for replica in plan.replicas
        if replica.num_samples and (not seen.gpus or set(seen.gpus) & set(replica.gpus))
        for first in [plan.first_sample(replica.replica, step)]
    }
    coordinator.event(
        kind,
        severity,
        text,
        now,
        seen.gpus[0] if seen.gpus else None,
        details={"step": step, "gpus": list(seen.gpus), "where": seen.where, "samples": samples},
    )


def _others_hold(model: ModelConfig, plan: GenerationPlan, gpus: Collection[str]) -> bool:
    """Whether all that `gpus` hold has another holder in the generation."""
    needed: set[tuple[str, int]] = set()
    there: set[tuple[str, int]] = set()
    for replica in plan.replicas:
        for slot in replica.live:
            units = {
                (family, unit)
                for family, held in held_units(model, replica.holders, slot).items()
                for unit in held
            }
            if replica.gpus[slot] in gpus:
                needed |= units
            else:
                there |= units
    return needed <= there
