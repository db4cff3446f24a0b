"""One stage of the `reshard` strategy on one rank: hand over, reduce, hand back.

Knows tensors, groups and who sends what to whom; not when each of the three is due.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from runtime.engine.group import Group, Reduction
from runtime.engine.state import State
from runtime.engine.watch import Work
from runtime.layout.move import Flow
from runtime.layout.reshard import Stage
from runtime.layout.sync import SyncGroup, joint_runs, runs
from runtime.layout.units import Held


@dataclass(frozen=True, slots=True)
class Lanes:
    """The process groups of the strategy on one rank.

    out, back: over the replica's slots, for the rows on their way to the core slots and back; None
        where no slot of the replica hands anything over. reduce: by index of the sync group.
    """

    out: Group | None
    back: Group | None
    reduce: Mapping[int, Group]


class _Box:
    """Rows that this rank exchanges with every slot of its replica, side by side in one message."""

    def __init__(self, rows: Sequence[Sequence[torch.Tensor]], like: torch.Tensor) -> None:
        self.rows = [row for peer in rows for row in peer]
        self.sizes = [sum(row.numel() for row in peer) for peer in rows]
        self.message = like.new_empty(sum(self.sizes))
        self.parts = list(self.message.split([row.numel() for row in self.rows]))
        ends = list(itertools.accumulate(len(peer) for peer in rows))
        self._peers = [(a, b) for a, b in itertools.pairwise([0, *ends]) if a < b]

    def pack(self) -> None:
        if self.rows:
            torch.cat(self.rows, out=self.message)

    def unpack(self) -> None:
        if self.rows:
            torch._foreach_copy_(self.rows, self.parts)

    def add(self) -> None:
        """Add the message to the rows, one peer after the other: two may send the same row."""
        for first, last in self._peers:
            torch._foreach_add_(self.rows[first:last], self.parts[first:last])


class _Core:
    """What this rank sums at one position: the rows of `units`, its own and those handed to it."""

    def __init__(self, stage: Stage, group: SyncGroup, state: State, lane: Group | None) -> None:
        self.lane = lane
        self.units = group.units
        self._state = state
        self._starts: dict[int, int] = {}
        size = 0
        for number in stage.numbers:
            parameter = state.layout.parameters[number]
            self._starts[number] = size
            size += len(group.units[parameter.family]) * parameter.row_elements
        self.sums = state.grads.new_empty(size)
        self.own: list[torch.Tensor] = []
        self.own_sums: list[torch.Tensor] = []
        for number in stage.numbers:
            extent = state.layout.extents[number]
            held, units = state.layout.held[extent.parameter.family], self._of(number)
            for here, there, count in joint_runs(held, units, sorted(set(held) & set(units))):
                self.own.append(state.grads[extent.slice(here, here + count)])
                self.own_sums.append(self._rows(number, there, there + count))
        self.has_all = sum(rows.numel() for rows in self.own) == size

    def rows(self, number: int, units: Sequence[int]) -> list[torch.Tensor]:
        """Views of the rows of `units` among the sums, neighbours as one."""
        return [self._rows(number, first, last) for first, last in runs(self._of(number), units)]

    def _of(self, number: int) -> tuple[int, ...]:
        return self.units[self._state.layout.parameters[number].family]

    def _rows(self, number: int, first: int, last: int) -> torch.Tensor:
        size = self._state.layout.parameters[number].row_elements
        start = self._starts[number]
        return self.sums[start + first * size : start + last * size]


class Passage:
    """One stage on this rank, from its gradients to their sums."""

    def __init__(
        self, stage: Stage, groups: Sequence[SyncGroup], flows: Sequence[Flow], state: State,
        lanes: Lanes,
    ) -> None:  # fmt: skip
        self.numbers = frozenset(stage.numbers)
        self._lanes = lanes
        self._cores = [_Core(stage, g, state, lanes.reduce.get(g.index)) for g in groups]
        self._giving: _Box | None = None
        self._taking: _Box | None = None
        if lanes.out is not None:
            me = lanes.out.ranks[lanes.out.rank]
            peers = lanes.out.ranks
            self._giving = _Box(
                [_given(stage, flows, me, peer, state) for peer in peers], state.grads
            )
            self._taking = _Box(
                [self._taken(stage, flows, peer, me, state) for peer in peers], state.grads
            )
        self._work: Work | None = None
        self._reductions: list[Reduction | None] = []

    @property
    def bytes_sent(self) -> int:
        """Bytes that leave this rank for slots of its own replica, there and back."""
        boxes = [box for box in (self._giving, self._taking) if box is not None]
        return sum(box.message.nbytes for box in boxes)

    def hand_over(self) -> None:
        if self._giving is None or self._taking is None or self._lanes.out is None:
            return
        self._giving.pack()
        self._work = self._lanes.out.start_exchange(
            self._giving.message, self._giving.sizes, self._taking.message, self._taking.sizes
        )

    def is_handed_over(self) -> bool:
        return self._work is None or self._work.is_completed()

    def reduce(self) -> None:
        """Sum what has come in and launch the reductions with the other replicas."""
        if self._work is not None and self._lanes.out is not None:
            self._lanes.out.finish(self._work)
        for core in self._cores:
            if not core.has_all:
                core.sums.zero_()
            if core.own:
                torch._foreach_copy_(core.own_sums, core.own)
        if self._taking is not None:
            self._taking.add()
        self._reductions = [
            core.lane.start_all_reduce(core.sums) if core.lane is not None else None
            for core in self._cores
        ]

    def is_reduced(self) -> bool:
        return all(
            core.lane is None or reduction is None or core.lane.poll(reduction)
            for core, reduction in zip(self._cores, self._reductions, strict=True)
        )

    def advance(self) -> None:
        for core, reduction in zip(self._cores, self._reductions, strict=True):
            if core.lane is not None and reduction is not None:
                core.lane.advance(reduction)

    def hand_back(self) -> None:
        """Finish the reductions, keep this rank's own sums and send the others back."""
        for core, reduction in zip(self._cores, self._reductions, strict=True):
            if core.lane is not None and reduction is not None:
                core.lane.finish_all_reduce(reduction)
            if core.own:
                torch._foreach_copy_(core.own, core.own_sums)
        if self._giving is None or self._taking is None or self._lanes.back is None:
            return
        self._taking.pack()
        self._work = self._lanes.back.start_exchange(
            self._taking.message, self._taking.sizes, self._giving.message, self._giving.sizes
        )

    def finish(self) -> None:
        if self._giving is None or self._work is None or self._lanes.back is None:
            return
        self._lanes.back.finish(self._work)
        self._giving.unpack()

    def _taken(
        self, stage: Stage, flows: Sequence[Flow], src: int, me: int, state: State
    ) -> list[torch.Tensor]:
        """The sums that rows from `src` are added to, in the order in which `_given` sends them."""
        return [
            rows
            for flow in flows
            if (flow.src, flow.dst) == (src, me)
            for core in [next(core for core in self._cores if _carries(core.units, flow.units))]
            for number in stage.numbers
            for rows in core.rows(number, flow.units[state.layout.parameters[number].family])
        ]


def _carries(units: Held, some: Held) -> bool:
    return all(set(some[family]) <= set(units[family]) for family in some)


def _given(
    stage: Stage, flows: Sequence[Flow], me: int, dst: int, state: State
) -> list[torch.Tensor]:
    """Gradients of the rows that this rank hands to `dst`; neighbouring rows as one view."""
    held = state.layout.held
    return [
        state.grads[state.layout.extents[number].slice(first, last)]
        for flow in flows
        if (flow.src, flow.dst) == (me, dst)
        for number in stage.numbers
        for family in [state.layout.parameters[number].family]
        for first, last in runs(held[family], flow.units[family])
    ]
