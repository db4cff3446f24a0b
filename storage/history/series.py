"""The steps of a run as columns for a chart: one by one while they are few, else the sums per
minute or hour, so that a run of millions of steps is drawn as fast as a short one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, func, or_, select

from storage.history.tables import ROLLUPS, RUNS, STEPS

# More steps than these are drawn from sums; so many minutes are still read at once
MAX_RAW = 20_000
MAX_SUMS = 20_000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSeries:
    """Columns over the steps of a run, ascending, thinned to a bounded number of points. NaN where
    a value was not a number.

    span_s: 0 when each point is a step (then the first and the last are there), else the seconds
    whose mean it is. exposed_sync_s: per step. tokens: committed up to here.
    """

    step: npt.NDArray[np.int64]
    at: Floats
    loss: Floats
    tokens_per_s: Floats
    step_s: Floats
    grad_norm: Floats
    generation: npt.NDArray[np.int64]
    tokens: Floats
    exposed_sync_s: Floats = field(default_factory=lambda: np.empty(0))
    span_s: int = 0

    def __len__(self) -> int:
        return len(self.step)


def series(connection: Connection, run_id: str, max_points: int) -> StepSeries:
    """At most `max_points` points."""
    counted = connection.scalar(select(RUNS.c.num_steps).where(RUNS.c.run == run_id)) or 0
    if counted <= MAX_RAW:
        return _raw(connection, run_id, max_points)
    mine = ROLLUPS.c.run == run_id
    counting = select(func.count()).select_from(ROLLUPS).where(mine, ROLLUPS.c.span_s == 60)
    minutes = connection.scalar(counting) or 0
    first = connection.scalar(select(func.min(ROLLUPS.c.first_step)).where(mine))
    kept = select(func.min(ROLLUPS.c.first_step)).where(mine, ROLLUPS.c.span_s == 60)
    # Minutes are let go of with age: they must still reach back to the first step
    whole = connection.scalar(kept) == first
    return _sums(connection, run_id, max_points, 60 if whole and minutes <= MAX_SUMS else 3600)


def _raw(connection: Connection, run_id: str, max_points: int) -> StepSeries:
    mine = STEPS.c.run == run_id
    num_steps = connection.scalar(select(func.count()).select_from(STEPS).where(mine)) or 0
    names = ("step", "at", "loss", "tokens", "step_s", "grad_norm", "generation", "exposed_sync_s")
    columns = [STEPS.c[name] for name in names]
    query = select(*columns).where(mine).order_by(STEPS.c.step)
    if num_steps > max_points:
        # By position, not by number: thinned history has holes. One point is for the last step.
        stride = math.ceil((num_steps - 1) / (max_points - 1))
        index = (func.row_number().over(order_by=STEPS.c.step) - 1).label("position")
        numbered = select(*columns, index).where(mine).subquery()
        kept = or_(numbered.c.position % stride == 0, numbered.c.position == num_steps - 1)
        query = select(*(numbered.c[name] for name in names)).where(kept).order_by(numbered.c.step)
    found = list(zip(*connection.execute(query).all(), strict=True)) or [()] * len(names)
    column = dict(zip(names, found, strict=True))
    step_s, tokens = _floats(column["step_s"]), _floats(column["tokens"])
    with np.errstate(divide="ignore", invalid="ignore"):
        tokens_per_s = np.where(step_s > 0, tokens / step_s, np.nan)
    return StepSeries(
        step=np.array(column["step"], dtype=np.int64),
        at=_floats(column["at"]),
        loss=_floats(column["loss"]),
        tokens_per_s=tokens_per_s,
        step_s=step_s,
        grad_norm=_floats(column["grad_norm"]),
        generation=np.array(column["generation"], dtype=np.int64),
        # All tokens up to here: a thinned step stands for those before it as well
        tokens=_running(tokens, np.array(column["step"], dtype=np.float64)),
        exposed_sync_s=_floats(column["exposed_sync_s"]),
    )


def _running(tokens: Floats, step: Floats) -> Floats:
    if not len(step):
        return tokens
    steps_since = np.diff(step, prepend=step[0] - 1)
    return np.asarray(np.cumsum(tokens * steps_since))


def _sums(connection: Connection, run_id: str, max_points: int, span_s: int) -> StepSeries:
    names = (
        "begin", "generation", "num_steps", "last_step", "tokens", "step_s", "exposed_sync_s",
        "num_losses", "loss_sum",
    )  # fmt: skip
    mine = (ROLLUPS.c.run == run_id) & (ROLLUPS.c.span_s == span_s) & (ROLLUPS.c.num_steps > 0)
    query = select(*(ROLLUPS.c[name] for name in names)).where(mine).order_by(ROLLUPS.c.last_step)
    rows = np.array([tuple(row) for row in connection.execute(query)], dtype=np.float64)
    column = dict(zip(names, rows.reshape(-1, len(names)).T, strict=True))
    merged = max(1, math.ceil(len(rows) / max_points))
    starts = np.arange(0, len(rows), merged)
    ends = np.minimum(starts + merged, len(rows)) - 1
    total = {
        name: np.add.reduceat(column[name], starts)
        for name in ("num_steps", "tokens", "step_s", "exposed_sync_s", "num_losses", "loss_sum")
    }
    with np.errstate(divide="ignore", invalid="ignore"):
        return StepSeries(
            step=column["last_step"][ends].astype(np.int64),
            at=column["begin"][ends] + span_s / 2,
            loss=total["loss_sum"] / np.where(total["num_losses"] > 0, total["num_losses"], np.nan),
            tokens_per_s=total["tokens"] / np.where(total["step_s"] > 0, total["step_s"], np.nan),
            step_s=total["step_s"] / total["num_steps"],
            grad_norm=np.full(len(starts), np.nan),
            generation=column["generation"][ends].astype(np.int64),
            tokens=np.cumsum(total["tokens"]),
            exposed_sync_s=total["exposed_sync_s"] / total["num_steps"],
            span_s=span_s * merged,
        )


def _floats(values: Sequence[float | None]) -> Floats:
    # NULL, which is None here, becomes NaN
    return np.array(values, dtype=np.float64)
