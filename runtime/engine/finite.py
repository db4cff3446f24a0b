"""Where values that are not finite came up first in a step: by rank, and where on it.

A NaN spreads to every slot of its replica with the next all-reduce, and to all ranks with the
gradients. So a step that came out not finite is run again with a `Probe` that looks at what each
slot adds, before that is summed. Looks only; what becomes of the step is the stepper's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.engine.group import Group
from runtime.engine.state import State, StateLayout

_NOWHERE = torch.iinfo(torch.int64).max
_BLOCKS = ("attention", "MLP")


@dataclass(frozen=True, slots=True)
class NotFinite:
    """ranks: world ranks on which values that are not finite came up first, ascending; () if none
    saw any. where: what they were, in words. again: so it was when the step was run once more."""

    ranks: tuple[int, ...]
    where: str
    again: bool


class Probe:
    """The earliest place of a step at which this rank met values that are not finite.

    Places count in the order of the computation: parameters, every block of every layer, the loss,
    then gradients from the last parameter to the first.
    """

    def __init__(self, layout: StateLayout) -> None:
        num_layers = 1 + max(parameter.layer for parameter in layout.parameters)
        self._loss = 1 + num_layers * len(_BLOCKS)
        self.place = _NOWHERE

    def look(self, place: int, tensor: torch.Tensor) -> None:
        if place < self.place and not bool(torch.isfinite(tensor).all()):
            self.place = place

    def parameters(self, state: State) -> None:
        self.look(0, state.params)

    def block(self, layer: int, block: int, partial: torch.Tensor) -> None:
        """partial: what this slot adds to the residual stream; block: 0 attention, 1 MLP."""
        self.look(1 + layer * len(_BLOCKS) + block, partial)

    def loss(self, loss: torch.Tensor) -> None:
        self.look(self._loss, loss)

    def gradients(self, state: State) -> None:
        """Look at the gradients before they are synchronised."""
        count = len(state.layout.extents)
        for number in reversed(range(count)):
            self.look(self._loss + count - number, state.rows(state.grads, number))

    def words(self, place: int, state: State) -> str:
        if place == 0:
            return "the parameters"
        if place < self._loss:
            layer, block = divmod(place - 1, len(_BLOCKS))
            return f"the {_BLOCKS[block]} of layer {layer}"
        if place == self._loss:
            return "the loss"
        if place == _NOWHERE:
            return "the sum of the gradients"
        parameter = state.layout.parameters[len(state.layout.extents) - (place - self._loss)]
        where = f" of layer {parameter.layer}" if parameter.layer >= 0 else ""
        return f"the gradient of {parameter.name}{where}"


def locate(probe: Probe, state: State, world: Group, *, again: bool) -> NotFinite:
    """Who met them first, the same on all ranks; every rank of `world` must call it.

    Raises:
        GenerationAborted: aborted, or a peer is gone.
    """
    mine = torch.tensor([probe.place], dtype=torch.int64, device=world.device)
    places = [int(place) for place in world.all_gather(mine).flatten().tolist()]
    first = min(places)
    ranks = tuple(rank for rank, place in enumerate(places) if place == first != _NOWHERE)
    return NotFinite(ranks, probe.words(first, state), again)
