"""A run that went back to a checkpoint: the steps it lost leave its line, but are kept.

In the transaction that records it, like everything that is kept of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from sqlalchemy import Connection, and_, delete, insert, select, update

from storage.history.rollups import take_out
from storage.history.tables import ROLLUPS, RUNS, STEPS, SUPERSEDED_STEPS
from storage.records import RunRolledBack

T = TypeVar("T")


def between_rollbacks(entries: Sequence[T]) -> list[list[T]]:
    """`entries` in parts that each begin with a rollback, but for the first."""
    parts: list[list[T]] = [[]]
    for entry in entries:
        if isinstance(entry, RunRolledBack) and parts[-1]:
            parts.append([])
        parts[-1].append(entry)
    return parts


def supersede(connection: Connection, run: str, back: RunRolledBack) -> None:
    """Take the lost steps out of the run's line and sums."""
    lost = and_(STEPS.c.run == run, STEPS.c.step >= back.step, STEPS.c.seq < back.seq)
    rows = [row._asdict() for row in connection.execute(select(STEPS).where(lost))]
    if not rows:
        return
    connection.execute(
        insert(SUPERSEDED_STEPS), [row | {"rolled_back_seq": back.seq} for row in rows]
    )
    connection.execute(delete(STEPS).where(lost))
    take_out(connection, run, rows)
    mine = ROLLUPS.c.run == run
    connection.execute(delete(ROLLUPS).where(mine, ROLLUPS.c.num_steps <= 0))
    connection.execute(
        update(ROLLUPS)
        .where(mine, ROLLUPS.c.last_step >= back.step)
        .values(last_step=back.step - 1)
    )
    newest = select(STEPS.c.step, STEPS.c.loss).where(STEPS.c.run == run)
    last = connection.execute(newest.order_by(STEPS.c.step.desc()).limit(1)).one_or_none()
    connection.execute(
        update(RUNS)
        .where(RUNS.c.run == run)
        .values(
            num_steps=RUNS.c.num_steps - len(rows),
            tokens=RUNS.c.tokens - sum(row["tokens"] for row in rows),
            last_step=last.step if last is not None else None,
            last_loss=last.loss if last is not None else None,
        )
    )
