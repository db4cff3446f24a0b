"""Which ranks must sum which gradient rows, and in what order (the `direct` strategy).

Every holder of a unit contributes a partial gradient and the synchronised gradient is the plain
sum over all holders in all replicas; that holds alike for query heads, key/value heads, MLP blocks,
vocabulary blocks and norms. Units with equal sets of holders share one process group and its
buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.config import ModelConfig
from runtime.errors import PlanError
from runtime.layout.units import (
    FAMILIES,
    STORED_FAMILIES,
    Held,
    held_by_slot,
    parameters,
    rota,
)
from runtime.plan.generation import GenerationPlan, ReplicaPlan


@dataclass(frozen=True, slots=True)
class SyncGroup:
    """World ranks (ascending) that hold exactly the same `units`; `index` is the global order."""

    index: int
    ranks: tuple[int, ...]
    units: Held


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `units` of parameter number `parameter` (its index in `parameters(model)`)."""

    parameter: int
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows that one all-reduce of group `group` sums, packed piece by piece, unit by unit.

    ready: position in backward order of its last piece; launch order is by (ready, group).
    """

    group: int
    pieces: tuple[Piece, ...]
    elements: int
    ready: int


def member_replicas(plan: GenerationPlan) -> tuple[tuple[int, ReplicaPlan], ...]:
    """Replicas with live slots, each with the world rank of its first live slot."""
    found, base = [], 0
    for replica in plan.replicas:
        if replica.mode == "out":
            continue
        found.append((base, replica))
        base += len(replica.live)
    return tuple(found)


def rank_tables(
    model: ModelConfig, replicas: Sequence[tuple[int, ReplicaPlan]]
) -> dict[str, npt.NDArray[np.int32]]:
    """World ranks that hold each unit of every sharded family, `(rows, units)`; -1: nobody.

    Every replica adds as many rows as a unit of the family has holders in it at most; rows may
    name a rank again.

    Args:
        replicas: with the world rank of their first live slot, as `member_replicas` has them.
    """
    tables = {
        family: np.stack([row for entry in replicas for row in _rank_rows(entry, family)])
        for family in STORED_FAMILIES
    }
    # A key/value head sits wherever one of its query heads does, so its column is theirs, stacked.
    heads = tables["attention"].reshape(len(tables["attention"]), model.num_kv_heads, -1)
    tables["kv"] = heads.transpose(0, 2, 1).reshape(-1, model.num_kv_heads)
    return tables


def _rank_rows(entry: tuple[int, ReplicaPlan], family: str) -> tuple[npt.NDArray[np.int32], ...]:
    base, replica = entry
    # The spare last entry answers for NO_HOLDER (-1).
    rank_of_slot = np.full(len(replica.gpus) + 1, -1, dtype=np.int32)
    rank_of_slot[list(replica.live)] = base + np.arange(len(replica.live), dtype=np.int32)
    return tuple(
        rank_of_slot[np.asarray(turn, dtype=np.int32)] for turn in rota(replica.holders, family)
    )


def _group_columns(table: npt.NDArray[np.int32]) -> dict[tuple[int, ...], list[int]]:
    """Columns of a rank table by their set of ranks (ascending, without -1)."""
    columns = np.ascontiguousarray(table.T)
    sets: dict[bytes, tuple[int, ...]] = {}
    grouped: dict[tuple[int, ...], list[int]] = {}
    for unit, column in enumerate(columns):
        key = column.tobytes()
        ranks = sets.get(key)
        if ranks is None:
            ranks = tuple(int(rank) for rank in np.unique(column) if rank >= 0)
            sets[key] = ranks
        grouped.setdefault(ranks, []).append(unit)
    return grouped


def holder_sets(model: ModelConfig, plan: GenerationPlan) -> dict[tuple[int, ...], Held]:
    """Every distinct set of world ranks with the units that exactly this set holds.

    Raises:
        PlanError: a unit that no rank holds.
    """
    replicas = member_replicas(plan)
    found: dict[tuple[int, ...], dict[str, list[int]]] = {}
    for family, table in rank_tables(model, replicas).items():
        for ranks, units in _group_columns(table).items():
            if not ranks:
                raise PlanError(f"no rank holds {family} unit {units[0]}")
            found.setdefault(ranks, {})[family] = units
    world = tuple(range(sum(replica.degree for _, replica in replicas)))
    found.setdefault(world, {})["replicated"] = [0]
    return {
        ranks: {family: tuple(units.get(family, ())) for family in FAMILIES}
        for ranks, units in found.items()
    }


def sync_groups(model: ModelConfig, plan: GenerationPlan) -> tuple[SyncGroup, ...]:
    """The process groups of a generation, in the order in which every rank builds them.

    Units with a single holder need no synchronisation and appear in no group.
    """
    sets = holder_sets(model, plan)
    shared = sorted(ranks for ranks in sets if len(ranks) > 1)
    return tuple(SyncGroup(index, ranks, sets[ranks]) for index, ranks in enumerate(shared))


def buckets(
    model: ModelConfig, groups: Iterable[SyncGroup], max_elements: int
) -> tuple[Bucket, ...]:
    """Fused buckets of `groups` in launch order.

    Launch order is one total order over all buckets of the generation; a rank that passes only its
    own groups gets the matching subsequence. A bucket closes once it has `max_elements` or more.
    """
    params = parameters(model)
    found: list[Bucket] = []
    for group in groups:
        pieces: list[Piece] = []
        elements = ready = 0
        for position, number in enumerate(reversed(range(len(params)))):
            units = group.units[params[number].family]
            if not units:
                continue
            pieces.append(Piece(number, units))
            elements += len(units) * params[number].row_elements
            ready = position
            if elements >= max_elements:
                found.append(Bucket(group.index, tuple(pieces), elements, ready))
                pieces, elements = [], 0
        if pieces:
            found.append(Bucket(group.index, tuple(pieces), elements, ready))
    return tuple(sorted(found, key=lambda bucket: (bucket.ready, bucket.group)))


def runs(held: Sequence[int], units: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Local row ranges `[start, stop)` of `units` on a slot that holds `held` (both ascending)."""
    rows = np.searchsorted(np.asarray(held, dtype=np.int64), np.asarray(units, dtype=np.int64))
    if len(rows) == 0:
        return ()
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    return tuple((int(part[0]), int(part[-1]) + 1) for part in np.split(rows, breaks))


def joint_runs(
    ours: Sequence[int], theirs: Sequence[int], units: Sequence[int]
) -> tuple[tuple[int, int, int], ...]:
    """Where `units` lie in two ascending rows of units: (start in ours, start in theirs, count)."""
    wanted = np.asarray(units, dtype=np.int64)
    first = np.searchsorted(np.asarray(ours, dtype=np.int64), wanted)
    second = np.searchsorted(np.asarray(theirs, dtype=np.int64), wanted)
    breaks = np.flatnonzero((np.diff(first) != 1) | (np.diff(second) != 1)) + 1
    starts = np.concatenate([[0], breaks]) if len(wanted) else breaks
    counts = np.diff(np.append(starts, len(wanted)))
    return tuple(
        (int(first[at]), int(second[at]), int(count))
        for at, count in zip(starts, counts, strict=True)
    )


def canonical_units(model: ModelConfig, plan: GenerationPlan, rank: int) -> Held:
    """Units that `rank` counts in the gradient norm, so that every element counts exactly once.

    Canonical is the lowest live slot that holds the unit in the first training replica.

    Raises:
        PlanError: no replica trains.
    """
    for base, replica in member_replicas(plan):
        if replica.mode != "training":
            continue
        counted: dict[str, set[int]] = {family: set() for family in FAMILIES}
        held = held_by_slot(model, replica.holders, replica.live)
        for position, slot in enumerate(replica.live):
            fresh = {
                family: tuple(u for u in units if u not in counted[family])
                for family, units in held[slot].items()
            }
            if base + position == rank:
                return fresh
            for family, units in fresh.items():
                counted[family].update(units)
        return dict.fromkeys(FAMILIES, ())
    raise PlanError("a generation needs a training replica; none trains")
