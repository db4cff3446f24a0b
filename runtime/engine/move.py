"""Carrying state from one layout to the next: parameters and optimizer moments, bit for bit.

Nothing of the old state is touched; the new one is returned complete and the caller swaps it in
once every rank has arrived. An abort on the way leaves the rank standing on its old layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.config import ModelConfig
from runtime.engine.group import Group
from runtime.engine.state import State, StateLayout
from runtime.layout.move import Flow, MovePlan, flow_elements
from runtime.layout.sync import runs
from runtime.layout.units import Held


@dataclass(frozen=True, slots=True)
class Moved:
    """The state on the new layout and what it took, in bytes on this rank."""

    state: State
    bytes_received: int
    bytes_sent: int


@torch.no_grad()
def move_state(
    model: ModelConfig,
    moves: MovePlan,
    old: State | None,
    fresh: State,
    world: Group,
    posted: Callable[[], None] = lambda: None,
) -> Moved:
    """Fill `fresh` from `old` and from other ranks; every rank of `world` must call it.

    Args:
        old: this rank's state as it is laid out now; None on a rank that brings nothing.
        fresh: an empty state on the new layout, returned filled when anything had to change;
            `old` itself where the layout stays.
        posted: called once every message of this rank is under way.

    Raises:
        GenerationAborted: `old` is intact, `fresh` must be dropped.
    """
    me = world.ranks[world.rank]
    element_bytes = fresh.params.element_size()
    sends, receives = [], []
    sent = received = 0
    for flow in moves.flows:
        size = flow_elements(model, flow) * element_bytes
        if flow.src == me:
            assert old is not None, "the move plan names only sources as senders"
            message = _pack(old, flow)
            sends.append((world.start_send(message, flow.dst), message))
            sent += size
        elif flow.dst == me:
            message = fresh.params.new_empty(flow_elements(model, flow))
            receives.append((world.start_receive(message, flow.src), message, flow))
            received += size
    posted()
    keeps_layout = old is not None and old.layout.held == fresh.layout.held
    if old is not None and not keeps_layout:
        _copy_kept(old, fresh)
    world.finish_messages([*(work for work, *_ in receives), *(work for work, _ in sends)])
    for _, message, flow in receives:
        _unpack(fresh, flow, message)
    return Moved(old if old is not None and keeps_layout else fresh, received, sent)


def _spans(layout: StateLayout, units: Held) -> list[slice]:
    """Ranges of `units` in a flat buffer, by parameter number: the order of every message."""
    return [
        extent.slice(first, last)
        for extent in layout.extents
        for first, last in runs(
            layout.held[extent.parameter.family], units[extent.parameter.family]
        )
    ]


def _pack(state: State, flow: Flow) -> torch.Tensor:
    spans = _spans(state.layout, flow.units)
    return torch.cat([flat[span] for flat in state.moving() for span in spans])


def _unpack(state: State, flow: Flow, message: torch.Tensor) -> None:
    spans = _spans(state.layout, flow.units)
    targets = [flat[span] for flat in state.moving() for span in spans]
    torch._foreach_copy_(targets, list(message.split([t.numel() for t in targets])))


def _copy_kept(old: State, fresh: State) -> None:
    """Copy the rows that both layouts hold."""
    both = {
        family: tuple(sorted(set(units) & set(fresh.layout.held[family])))
        for family, units in old.layout.held.items()
    }
    for source, target in zip(old.moving(), fresh.moving(), strict=True):
        # Runs may break differently in the two layouts; their concatenations are equally long.
        rows = torch.cat([source[span] for span in _spans(old.layout, both)])
        parts = [target[span] for span in _spans(fresh.layout, both)]
        torch._foreach_copy_(parts, list(rows.split([part.numel() for part in parts])))
