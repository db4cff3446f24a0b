"""What a shape looks like: which look each GPU and slot gets. Pure; knows no Streamlit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from app.palette import CELL_CODES, DEGRADED_RUN, STATUS_LOOKS, Look
from app.words import percent
from storage.records import GPU_STATES, Option, RackRecord, ReplicaState, RunState

Looks = Mapping[str, npt.NDArray[np.uint8]]
BOOST_MARGIN = 1.001
MAX_ROWS = 32
HEALTHY = GPU_STATES.index("healthy")


@dataclass(frozen=True, kw_only=True)
class ShapeRow:
    """One replica of a shape strip. cells: (name in `CELL_LOOKS`, GPU id), one a slot."""

    label: str
    sub: str
    cells: tuple[tuple[str, str], ...]
    right: str


def slot_of(gpu: str) -> int:
    """Slot of a GPU id `rack/slot`."""
    return int(gpu.rpartition("/")[2])


def rack_looks(
    racks: Mapping[str, RackRecord], replicas: Sequence[ReplicaState]
) -> dict[str, npt.NDArray[np.uint8]]:
    """A code of `CELL_LOOKS` per GPU and rack: state, boost, left out or not."""
    looks = {}
    for name, record in racks.items():
        codes = np.frombuffer(record.states, np.uint8).copy()
        healthy = codes == HEALTHY
        boosted = healthy & (record.column("cap_w") > record.normal_cap_w * BOOST_MARGIN)
        codes[boosted] = CELL_CODES["boosted"]
        looks[name] = codes
    for replica in replicas:
        for gpu in replica.spares:
            rack, place = looks.get(gpu.rpartition("/")[0]), slot_of(gpu)
            if rack is not None and place < len(rack) and rack[place] == HEALTHY:
                rack[place] = CELL_CODES["spare"]
        live = set(replica.live)
        for slot, gpu in enumerate(replica.gpus):
            rack, place = looks.get(gpu.rpartition("/")[0]), slot_of(gpu)
            if rack is None or place >= len(rack) or rack[place] != HEALTHY:
                continue
            if replica.mode != "training":
                rack[place] = CELL_CODES["idle"]
            elif slot not in live:
                rack[place] = CELL_CODES["dead"]
    return looks


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts r2 before r10."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def is_whole(replica: ReplicaState) -> bool:
    """Every slot is live and trains."""
    return replica.mode == "training" and len(replica.live) == len(replica.gpus)


def status_look(state: RunState) -> Look:
    """The run's status; a run that trains with a reduced or missing replica says so."""
    whole = all(map(is_whole, state.replicas))
    if state.status == "running" and not whole:
        return DEGRADED_RUN
    return STATUS_LOOKS[state.status]


def most_pressing(
    replicas: Sequence[ReplicaState], limit: int = MAX_ROWS
) -> tuple[list[ReplicaState], str]:
    """At most `limit` replicas, those that are not whole first, in order of their number; and a
    sentence about the others."""
    chosen = sorted(replicas, key=is_whole)[:limit]
    hidden = len(replicas) - len(chosen)
    whole = sum(map(is_whole, replicas)) - sum(map(is_whole, chosen))
    if hidden == 0:
        return list(replicas), ""
    note = f"{hidden} more replicas are not shown; {whole} of them are whole."
    return sorted(chosen, key=lambda one: one.replica), note


def shape_rows(replicas: Sequence[ReplicaState], batch: int, looks: Looks) -> tuple[ShapeRow, ...]:
    """The shape as it stands, one row a replica."""
    names = list(CELL_CODES)
    rows = []
    for replica in replicas:
        cells = []
        for slot, gpu in enumerate(replica.gpus):
            rack = looks.get(gpu.rpartition("/")[0])
            place = slot_of(gpu)
            if rack is not None and place < len(rack):
                name = names[rack[place]]
            else:
                name = "healthy" if slot in replica.live else "failed"
            cells.append((name, gpu))
        rows.append(_row(replica, tuple(cells), batch, len(replica.live)))
    return tuple(rows)


def before_rows(
    before: Sequence[ReplicaState], options: Sequence[Option], batch: int
) -> tuple[ShapeRow, ...]:
    """The shape a proposal was computed for. A slot that no option would make live is failed."""
    rows = []
    for index, replica in enumerate(before):
        # Where a spare would go, the slot's own GPU is no better for it.
        own = [one for one in options if index < len(one.shape) and not one.gpus]
        usable = {slot for one in own for slot in one.shape[index]}
        cells = tuple(
            _planned(gpu, slot in replica.live, replica.mode == "training", False)
            if slot in replica.live or slot in usable
            else ("failed", gpu)
            for slot, gpu in enumerate(replica.gpus)
        )
        rows.append(_row(replica, cells, batch, len(replica.live)))
    return tuple(rows)


def after_rows(before: Sequence[ReplicaState], option: Option) -> tuple[ShapeRow, ...]:
    """The shape that `option` would give, with the GPUs it puts into slots of their rack."""
    refilled = option.gpus[0].rpartition("/")[0] if option.gpus else ""
    rows = []
    for index, replica in enumerate(before):
        live = option.shape[index] if index < len(option.shape) else ()
        filled = option.gpus if replica.rack == refilled else replica.gpus
        samples = option.samples[index] if index < len(option.samples) else 0
        trains = bool(live)
        # A replica that is left out keeps its healthy GPUs; they idle
        shown = live if trains else replica.live
        cells = tuple(
            _planned(gpu, slot in shown, trains, gpu in option.caps_w)
            for slot, gpu in enumerate(filled)
        )
        word = f"{len(live)} of {len(replica.gpus)} slots" if trains else "left out"
        rows.append(
            ShapeRow(
                label=f"Replica {replica.replica}",
                sub=replica.rack,
                cells=cells,
                right=f"{word}, {samples} samples",
            )
        )
    return tuple(rows)


def _planned(gpu: str, live: bool, trains: bool, boosted: bool) -> tuple[str, str]:
    if not live:
        return "dead", gpu
    if not trains:
        return "idle", gpu
    return ("boosted" if boosted else "healthy"), gpu


def _row(
    replica: ReplicaState, cells: tuple[tuple[str, str], ...], batch: int, degree: int
) -> ShapeRow:
    if replica.mode == "training":
        word = f"{degree} of {len(replica.gpus)} slots"
        share = f"{replica.num_samples} samples, {percent(replica.num_samples / max(batch, 1), 0)}"
    else:
        word, share = ("left out" if replica.mode == "standby" else "out"), "0 samples"
    return ShapeRow(
        label=f"Replica {replica.replica}",
        sub=replica.rack,
        cells=cells,
        right=f"{word}, {share}",
    )
