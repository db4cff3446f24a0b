"""How a slot with shared units computes: its whole units on every sample, others on some.

A `Part` is a set of units with the turns they are worked on. The parts of a leaf are cut out of it
with one `split`, so that backward joins their gradients with one concatenation. Without shared
units there is no part at all and the model takes its plain path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from runtime.layout.shares import SlotShare


@dataclass(frozen=True, slots=True)
class Part:
    """units: ascending. turns: in which they are worked on; None: in all."""

    units: tuple[int, ...]
    turns: frozenset[int] | None


class Parts:
    """The parts of one family on one slot; None stands for "no unit is shared"."""

    def __init__(self, share: SlotShare, device: torch.device) -> None:
        self.num_turns = share.num_turns
        self.parts = [Part(share.whole, None)] if share.whole else []
        self.parts += [Part(units, turns) for turns, units in share.shared]
        self._device = device
        self._samples: dict[tuple[int, int, int], torch.Tensor] = {}

    def samples(self, number: int, first: int, count: int) -> torch.Tensor:
        """Which of `count` samples, of which the replica's number `first` is the first, part
        `number` works on; int64, kept because micro-batches come again and again."""
        key = (number, first % self.num_turns, count)
        if key not in self._samples:
            turns = self.parts[number].turns
            at = [i for i in range(count) if turns is None or (first + i) % self.num_turns in turns]
            self._samples[key] = torch.tensor(at, dtype=torch.int64, device=self._device)
        return self._samples[key]

    def apply(
        self,
        x: torch.Tensor,
        first: int,
        compute: Callable[[int, torch.Tensor, torch.Tensor | slice], torch.Tensor],
    ) -> torch.Tensor:
        """Sum of all parts' outputs, each on its own samples; shape of `x`.

        compute: (number of the part, its samples of `x`, which those are) -> its output for them.
        """
        out: torch.Tensor | None = None
        for number, part in enumerate(self.parts):
            if part.turns is None:
                out = compute(number, x, slice(None))
                continue
            samples = self.samples(number, first, x.shape[0])
            if not len(samples):
                continue
            if out is None:
                out = torch.zeros_like(x)
            out.index_add_(0, samples, compute(number, x.index_select(0, samples), samples))
        # Not plain zeros: backward must reach the norm before, whose collective all slots call.
        return x * 0.0 if out is None else out


class Cut:
    """Cuts a leaf of `rows` rows, `height` elements of dim 0 each, into the rows of every part."""

    def __init__(self, rows: Sequence[Sequence[int]], num_rows: int, height: int) -> None:
        owners = [
            tuple(i for i, mine in enumerate(map(set, rows)) if row in mine)
            for row in range(num_rows)
        ]
        self._sizes: list[int] = []
        self._pieces: list[list[int]] = [[] for _ in rows]
        for number, (owner, run) in enumerate(groupby(owners)):
            self._sizes.append(len(list(run)) * height)
            for part in owner:
                self._pieces[part].append(number)

    def __call__(self, leaf: torch.Tensor) -> list[torch.Tensor]:
        pieces = leaf.split(self._sizes)
        return [
            pieces[numbers[0]] if len(numbers) == 1 else torch.cat([pieces[n] for n in numbers])
            for numbers in self._pieces
        ]
