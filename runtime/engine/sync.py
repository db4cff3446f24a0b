"""Gradient sync: every rank ends with the sum of a row's gradients over all its holders.

`GradientSync` is the port; `DirectSync` needs no exchange inside a rack, `ReshardSync` beside it is
the NTP paper's way, chosen by `train.sync`. Buckets overlap with backward. A failure while
launching is latched, never raised out of an autograd hook, and surfaces in `finish`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from runtime.engine.group import Group, Reduction
from runtime.engine.state import State
from runtime.errors import GenerationAborted
from runtime.layout.sync import Bucket, runs


class GradientSync(Protocol):
    """One synchronisation per step; all methods run on the training thread."""

    def begin(self) -> None:
        """The last backward of the step is about to start; gradients so far are accumulated."""

    def ready(self, numbers: Sequence[int]) -> None:
        """The gradients of these parameters are final; never raises."""

    def finish(self) -> None:
        """Launch what is left, wait, and leave synchronised gradients in the state.

        Every rank of the world calls it once a step, standby ranks included.

        Raises:
            GenerationAborted: aborted, or a peer is gone; the gradients are then undefined.
        """


class _Parcel:
    """One bucket on this rank: views of its rows in the gradient buffer, and its message."""

    def __init__(self, bucket: Bucket, state: State, group: Group) -> None:
        self.group = group
        self.numbers = frozenset(piece.parameter for piece in bucket.pieces)
        self.rows: list[torch.Tensor] = []
        for piece in bucket.pieces:
            extent = state.layout.extents[piece.parameter]
            held = state.layout.held[extent.parameter.family]
            for first, last in runs(held, piece.units):
                self.rows.append(state.grads[extent.slice(first, last)])
        self.message = state.grads.new_empty(bucket.elements)
        self.parts = list(self.message.split([row.numel() for row in self.rows]))

    def launch(self) -> Reduction:
        torch.cat(self.rows, out=self.message)
        return self.group.start_all_reduce(self.message)

    def unpack(self) -> None:
        torch._foreach_copy_(self.rows, self.parts)


class DirectSync:
    """One fused all-reduce per bucket over exactly the holders of its rows.

    Messages belong to this object and it to one generation: an abandoned collective may still
    write to them after an abort, so they are never used again.
    """

    def __init__(
        self, buckets: Sequence[Bucket], groups: Mapping[int, Group], state: State
    ) -> None:
        self._parcels = [_Parcel(bucket, state, groups[bucket.group]) for bucket in buckets]
        self._missing: set[int] = set()
        self._reductions: list[Reduction] = []
        self._failure: GenerationAborted | None = None
        self._armed = False

    def begin(self) -> None:
        self._missing = set().union(*(parcel.numbers for parcel in self._parcels))
        self._reductions = []
        self._armed = True

    def ready(self, numbers: Sequence[int]) -> None:
        if not self._armed:
            return
        self._missing.difference_update(numbers)
        self._launch()

    def finish(self) -> None:
        self._missing.clear()
        self._launch()
        self._armed = False
        if self._failure is not None:
            raise self._failure
        for parcel, reduction in zip(self._parcels, self._reductions, strict=True):
            parcel.group.advance(reduction)
        for parcel, reduction in zip(self._parcels, self._reductions, strict=True):
            parcel.group.finish_all_reduce(reduction)
            parcel.unpack()

    def _launch(self) -> None:
        """Launch buckets in their one order, as far as their gradients are there."""
        try:
            while (
                self._failure is None
                and len(self._reductions) < len(self._parcels)
                and self._missing.isdisjoint(self._parcels[len(self._reductions)].numbers)
            ):
                self._reductions.append(self._parcels[len(self._reductions)].launch())
        except GenerationAborted as error:
            self._failure = error


def bucket_elements(bucket_mb: float, dtype: torch.dtype) -> int:
    """Elements at which a bucket of `bucket_mb` megabytes closes."""
    return max(1, math.ceil(bucket_mb * 1e6 / torch.empty((), dtype=dtype).element_size()))
