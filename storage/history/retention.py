"""What the history lets go of with age: steps one by one after two weeks, minutes after a quarter.
Sums per hour, events, decisions, proposals, generations, the ledger and the audit stay for ever."""

from __future__ import annotations

from sqlalchemy import Engine, Integer, cast, delete, func, select

from storage.history.database import reading, writing
from storage.history.tables import ROLLUPS, RUNS, STEPS

RAW_STEPS_S = 14 * 24 * 3600.0
KEEP_ONE_PER_S = 60.0
MINUTES_S = 91 * 24 * 3600.0
HOUR_S = 3600.0


def thin_steps(engine: Engine, now: float) -> int:
    """Of the steps older than two weeks keep the first of every minute, of those older than a
    quarter the first of every hour, and each run's last one; drop the sums of old minutes.

    Returns the number of steps removed. One transaction per run, so that the recorder's writes get
    between.

    Raises:
        HistoryDown: the database cannot be used; nothing is lost, try later.
    """
    cutoff = now - RAW_STEPS_S
    with reading(engine) as connection:
        runs = connection.scalars(select(RUNS.c.run).where(RUNS.c.started_at < cutoff)).all()
    removed = 0
    for run in runs:
        removed += _thin_run(engine, run, cutoff, KEEP_ONE_PER_S)
        removed += _thin_run(engine, run, now - MINUTES_S, HOUR_S)
    stale = (ROLLUPS.c.span_s == 60) & (ROLLUPS.c.begin < now - MINUTES_S)
    with writing(engine) as connection:
        connection.execute(delete(ROLLUPS).where(stale))
    return removed


def _thin_run(engine: Engine, run: str, cutoff: float, one_per_s: float) -> int:
    old = (STEPS.c.run == run) & (STEPS.c.at < cutoff)
    minute = cast(STEPS.c.at / one_per_s, Integer)
    first = select(func.min(STEPS.c.step)).where(old).group_by(minute)
    last = select(func.max(STEPS.c.step)).where(STEPS.c.run == run).scalar_subquery()
    with writing(engine) as connection:
        surplus = old & STEPS.c.step.not_in(first) & (STEPS.c.step != last)
        return connection.execute(delete(STEPS).where(surplus)).rowcount
