"""Steps added up per minute and hour, in the transaction that writes the steps.

A step that is committed again takes its old self out of the sums first, so that they always equal
what the steps say. Long histories are drawn from these: raw steps are thinned with age.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqlalchemy import Connection, case, select
from sqlalchemy.dialects import postgresql, sqlite

from storage.history.rows import Row
from storage.history.tables import ROLLUPS, STEPS

SPANS_S = (60, 3600)
_SUMS = ("num_steps", "tokens", "step_s", "exposed_sync_s", "num_losses", "loss_sum")


def known_steps(connection: Connection, run: str, steps: Sequence[Row]) -> dict[int, Row]:
    """Those of `steps` that are in the table already, as they stand there."""
    if not steps:
        return {}
    numbers = [row["step"] for row in steps]
    within = STEPS.c.step.between(min(numbers), max(numbers))
    names = ("step", "seq", "at", "generation", "tokens", "step_s", "exposed_sync_s", "loss")
    query = select(*(STEPS.c[name] for name in names)).where(STEPS.c.run == run, within)
    found = {row.step: row._asdict() for row in connection.execute(query)}
    return {number: found[number] for number in numbers if number in found}


def roll_up(connection: Connection, run: str, steps: Sequence[Row], known: dict[int, Row]) -> None:
    """Add `steps`, of which `known` were in the table before."""
    sums: dict[tuple[int, int, int], Row] = {}
    for row in steps:
        old = known.get(row["step"])
        if old is not None:
            if old["seq"] >= row["seq"]:
                continue
            _add(sums, old, -1)
        _add(sums, row, 1)
    _write(connection, run, sums)


def take_out(connection: Connection, run: str, steps: Sequence[Row]) -> None:
    """Take `steps` out of the sums: they are no part of the run any more."""
    sums: dict[tuple[int, int, int], Row] = {}
    for row in steps:
        _add(sums, row, -1)
    _write(connection, run, sums)


def _write(connection: Connection, run: str, sums: dict[tuple[int, int, int], Row]) -> None:
    if not sums:
        return
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(ROLLUPS)
    new, there = statement.excluded, ROLLUPS.c
    # A sum that only lost a step says nothing of first and last
    change = {name: there[name] + new[name] for name in _SUMS} | {
        "first_step": case(
            (new.first_step < there.first_step, new.first_step), else_=there.first_step
        ),
        "last_step": case((new.last_step > there.last_step, new.last_step), else_=there.last_step),
    }
    statement = statement.on_conflict_do_update(
        index_elements=["run", "span_s", "begin", "generation"], set_=change
    )
    rows = [
        row | {"run": run, "span_s": span_s, "begin": begin, "generation": generation}
        for (span_s, begin, generation), row in sums.items()
    ]
    connection.execute(statement, rows)


def _add(sums: dict[tuple[int, int, int], Row], step: Row, sign: int) -> None:
    loss = step["loss"]
    values = {
        "num_steps": 1,
        "tokens": step["tokens"],
        "step_s": step["step_s"] or 0.0,
        "exposed_sync_s": step["exposed_sync_s"] or 0.0,
        "num_losses": int(loss is not None),
        "loss_sum": loss or 0.0,
    }
    for span_s in SPANS_S:
        begin = math.floor(step["at"] / span_s) * span_s
        number = step["step"]
        row = sums.setdefault(
            (span_s, begin, step["generation"]),
            dict.fromkeys(_SUMS, 0) | {"first_step": number, "last_step": number},
        )
        for name, value in values.items():
            row[name] += sign * value
        row["first_step"] = min(row["first_step"], number)
        row["last_step"] = max(row["last_step"], number)
