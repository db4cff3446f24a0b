"""What the history lets go of: raw steps, once they are old. Events, decisions, proposals,
generations and the ledger stay for ever."""

from __future__ import annotations

from sqlalchemy import Engine, Integer, cast, delete, func, select

from storage.history.database import reading, writing
from storage.history.tables import RUNS, STEPS

RAW_STEPS_S = 14 * 24 * 3600.0
KEEP_ONE_PER_S = 60.0


def thin_steps(engine: Engine, now: float) -> int:
    """Of the steps older than two weeks keep the first of every minute, and each run's last one.

    Returns the number of rows removed. One transaction per run, so that the recorder's writes get
    between.

    Raises:
        HistoryDown: the database cannot be used; nothing is lost, try later.
    """
    cutoff = now - RAW_STEPS_S
    with reading(engine) as connection:
        runs = connection.scalars(select(RUNS.c.run).where(RUNS.c.started_at < cutoff)).all()
    return sum(_thin_run(engine, run, cutoff) for run in runs)


def _thin_run(engine: Engine, run: str, cutoff: float) -> int:
    old = (STEPS.c.run == run) & (STEPS.c.at < cutoff)
    minute = cast(STEPS.c.at / KEEP_ONE_PER_S, Integer)
    first = select(func.min(STEPS.c.step)).where(old).group_by(minute)
    last = select(func.max(STEPS.c.step)).where(STEPS.c.run == run).scalar_subquery()
    with writing(engine) as connection:
        surplus = old & STEPS.c.step.not_in(first) & (STEPS.c.step != last)
        return connection.execute(delete(STEPS).where(surplus)).rowcount
