"""Rows of the Replicas page: pace, slowest slot, boost, and who holds how many units (before and
after the last change) and which. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app.components.parts import Column, Row, marked
from app.palette import DEGRADED_RUN, SEVERITY_LOOKS, STATUS_LOOKS, Look
from app.shapes import is_whole, slot_of
from app.words import DASH, number, percent, seconds
from storage.holdings import Holdings, at_home
from storage.records import RackRecord, ReplicaState, RunState

FAMILY_WORDS = {"attention": "Query heads", "mlp": "MLP blocks", "vocab": "Vocabulary blocks"}
MODE_WORDS = {"training": "training", "standby": "left out (standby)", "out": "out: no live slot"}
PACE_COLUMNS = (
    Column(label="Replica"),
    Column(label="Mode"),
    Column(label="Degree", kind="right", title="live slots"),
    Column(label="Dead slots", kind="right"),
    Column(label="Samples a step", kind="right"),
    Column(label="Share of batch", kind="right"),
    Column(label="Own step time", kind="right", title="without waiting for the others"),
    Column(label="Against healthy pace", kind="right", title="own step time over the healthy one"),
    Column(label="Slowest slot", kind="right", title="over the median of the replica's slots"),
    Column(label="Boost", kind="right", title="above the normal cap, on the most boosted GPU"),
    Column(
        label="More it can lose", kind="right", title="failures that power can still make up for"
    ),
    Column(label="Spares", title="GPUs of its rack that wait to take a dead slot's place"),
)


def pace_rows(
    state: RunState, racks: Mapping[str, RackRecord], previous: Mapping[int, ReplicaState]
) -> list[Row]:
    """One row a replica; what a number was before the last change shows on hover."""
    training = [one.step_s for one in state.replicas if one.mode == "training"]
    slowest = max(training, default=0.0) if len(training) > 1 else -1.0
    return [
        _pace_row(one, state, racks, slowest, previous.get(one.replica)) for one in state.replicas
    ]


def _pace_row(
    replica: ReplicaState,
    state: RunState,
    racks: Mapping[str, RackRecord],
    slowest: float,
    before: ReplicaState | None,
) -> Row:
    trains = replica.mode == "training"
    pace = DASH
    if trains and state.ideal_step_s > 0 and replica.step_s > 0:
        slow = " slowest" if replica.step_s == slowest else ""
        pace = f"{replica.step_s / state.ideal_step_s:.2f} ×{slow}"
    dead = [str(slot) for slot in range(len(replica.gpus)) if slot not in replica.live]
    more = replica.boostable_failures
    return Row(
        id=str(replica.replica),
        cells=(
            f"{replica.replica}, {replica.rack}",
            marked(mode_look(replica), MODE_WORDS[replica.mode]),
            _was(
                f"{len(replica.live)} of {len(replica.gpus)}",
                f"{len(before.live)} of {len(before.gpus)}" if before else None,
            ),
            ", ".join(dead) or "none",
            _was(number(replica.num_samples), number(before.num_samples) if before else None),
            percent(replica.num_samples / max(state.global_batch, 1)),
            _was(
                seconds(replica.step_s) if trains else DASH,
                seconds(before.step_s) if before else None,
            ),
            pace,
            slowest_slot(replica, racks) if trains else DASH,
            f"+{number(replica.boost_w)} W" if replica.boost_w > 0 else "none",
            str(more) if more >= 0 else DASH,
            ", ".join(replica.spares) or "none",
        ),
    )


def slowest_slot(replica: ReplicaState, racks: Mapping[str, RackRecord]) -> str:
    """`5 (1.32 ×)`: the live slot that takes longest, over the median; a dash when not known."""
    times = []
    for slot in replica.live:
        record = racks.get(replica.gpus[slot].rpartition("/")[0])
        place = slot_of(replica.gpus[slot])
        if record is not None and place < record.num_gpus:
            times.append((float(record.column("step_s")[place]), slot))
    times = [one for one in times if one[0] > 0]
    if not times:
        return DASH
    worst, slot = max(times)
    middle = float(np.median([one[0] for one in times]))
    return f"{slot} ({worst / middle:.2f} ×)"


def unit_table(
    replica: ReplicaState, before: ReplicaState | None
) -> tuple[list[Column], list[Row]]:
    """How many units of each family each slot holds; before the last change on hover."""
    slots = range(len(replica.gpus))
    columns = [Column(label=f"Replica {replica.replica}: family")]
    columns += [Column(label=f"slot {slot}", kind="right") for slot in slots]
    columns.append(Column(label="total", kind="right"))
    live = set(replica.live)
    rows = []
    for family, counts in replica.units.items():
        had = before.units.get(family, ()) if before else ()
        cells: list[Any] = [family]
        for slot in slots:
            held = number(counts[slot]) if slot in live and slot < len(counts) else DASH
            cells.append(_was(held, number(had[slot]) if slot < len(had) else None))
        rows.append(Row(id=family, cells=(*cells, number(sum(counts)))))
    return columns, rows


def which_units(
    replicas: Sequence[ReplicaState],
) -> list[tuple[str, list[Column], list[Row]]]:
    """Tables (name, columns, rows) of which units each slot holds: one for every replica that is
    not at home, one for all that are alike at home. `0–1, 14`: alone; `+ 15 (2 of 6)`: shared."""
    alike: dict[Any, list[ReplicaState]] = {}
    for one in replicas:
        alike.setdefault(one.replica if one.holdings else str(one.units), []).append(one)
    return [_which(group) for group in alike.values()]


def _which(alike: Sequence[ReplicaState]) -> tuple[str, list[Column], list[Row]]:
    one = alike[0]
    holdings = one.holdings or at_home(one.units)
    numbers = ", ".join(str(each.replica) for each in alike)
    name = f"Replica{'s' if len(alike) > 1 else ''} {numbers}"
    columns = [Column(label=f"{name}: slot")]
    columns += [Column(label=FAMILY_WORDS.get(family, family), kind="wide") for family in one.units]
    rows = []
    for slot in range(len(one.gpus)):
        held = [_held(holdings, family, slot) if slot in one.live else DASH for family in one.units]
        rows.append(Row(id=str(slot), cells=(str(slot), *held)))
    return name, columns, rows


def _held(holdings: Holdings, family: str, slot: int) -> str:
    runs = holdings.alone[family][slot] if slot < len(holdings.alone.get(family, ())) else ()
    text = ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)
    for one in holdings.shared.get(family, ()):
        if slot in one.turns:
            text += f" + {one.unit} ({one.turns.count(slot)} of {len(one.turns)})"
    return text.removeprefix(" + ") or DASH


def mode_look(replica: ReplicaState) -> Look:
    if replica.mode != "training":
        return SEVERITY_LOOKS["critical" if replica.mode == "out" else "warning"]
    return STATUS_LOOKS["running"] if is_whole(replica) else DEGRADED_RUN


def _was(now: str, before: str | None) -> Any:
    """A cell that says on hover what it was before the last change, and is marked if it differs."""
    if before is None or before == now or (before == "0" and now == DASH):
        return now
    return {"text": now, "title": f"before the last change: {before}", "changed": True}
