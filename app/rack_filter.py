"""Which racks and GPUs are shown, and in which order. Pure: numpy per rack, nothing per GPU.

An order by a live value is taken once and kept, so that racks do not swap places at every tick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from app.palette import CELL_CODES
from app.shapes import Looks, natural
from storage.records import RackRecord

Mask = npt.NDArray[np.bool_]
# Left-out and dead slots follow from a failure elsewhere; what counts is the causes
QUIET = [CELL_CODES[name] for name in ("healthy", "idle", "dead", "spare")]


@dataclass(frozen=True, kw_only=True)
class RackQuery:
    """search: part of a rack's name, or of a GPU id. states: names in `CELL_LOOKS`, () all."""

    search: str = ""
    states: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.search and not self.states


def matches(racks: Mapping[str, RackRecord], looks: Looks, query: RackQuery) -> dict[str, Mask]:
    """Rack -> which of its GPUs match; racks without one are left out."""
    wanted = [CELL_CODES[name] for name in query.states]
    needle = query.search.strip().lower()
    found = {}
    for name, record in racks.items():
        mask = np.ones(record.num_gpus, bool)
        if wanted:
            mask &= np.isin(looks[name], wanted)
        if needle:
            mask &= _named(name.lower(), record.num_gpus, needle)
        if mask.any():
            found[name] = mask
    return found


def _named(rack: str, num_gpus: int, needle: str) -> Mask:
    if "/" not in needle:
        return np.full(num_gpus, needle in rack)
    part, _, slot = needle.rpartition("/")
    mask = np.zeros(num_gpus, bool)
    if rack.endswith(part):
        chosen = [index for index in range(num_gpus) if str(index).startswith(slot)]
        mask[chosen] = True
    return mask


def _to_look_at(record: RackRecord, looks: npt.NDArray[np.uint8]) -> float:
    return -float(np.count_nonzero(~np.isin(looks, QUIET)))


def _power_share(record: RackRecord, looks: npt.NDArray[np.uint8]) -> float:
    return -float(np.nansum(record.column("power_w"))) / max(record.budget_w, 1.0)


def _hottest(record: RackRecord, looks: npt.NDArray[np.uint8]) -> float:
    values = record.column("temp_c")
    return -float(np.nanmax(values)) if np.isfinite(values).any() else 0.0


SORTS: dict[str, Callable[[RackRecord, npt.NDArray[np.uint8]], float] | None] = {
    "name": None,
    "most to look at": _to_look_at,
    "power of budget": _power_share,
    "hottest GPU": _hottest,
}


def ordered(racks: Mapping[str, RackRecord], looks: Looks, sort: str) -> tuple[str, ...]:
    """Names of the racks in the order `sort`; equal ones by name."""
    names = sorted(racks, key=natural)
    key = SORTS.get(sort)
    if key is not None:
        names.sort(key=lambda name: key(racks[name], looks[name]))
    return tuple(names)


def in_order(racks: Mapping[str, RackRecord], order: Sequence[str]) -> dict[str, RackRecord]:
    """`racks` in a kept order; racks it does not know come last."""
    known = [name for name in order if name in racks]
    new = sorted(set(racks) - set(known), key=natural)
    return {name: racks[name] for name in [*known, *new]}
