"""A rank's training state: parameters, gradients and AdamW moments in flat buffers.

Rows of a parameter are its local units in ascending order. Parameters that a layer multiplies in
one matrix product lie side by side. Both regions (matrices, then norms) are padded so that
elementwise kernels never meet a scalar tail: the same element then rounds alike wherever it lies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from runtime.config import ModelConfig
from runtime.layout.sync import runs
from runtime.layout.units import FAMILIES, Held, Parameter, num_units, parameters

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one parameter lies in the flat buffers: `rows` rows from element `start`."""

    parameter: Parameter
    start: int
    rows: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.parameter.row_elements

    def slice(self, first_row: int, last_row: int) -> slice:
        """Elements of the rows `[first_row, last_row)`."""
        size = self.parameter.row_elements
        return slice(self.start + first_row * size, self.start + last_row * size)


class StateLayout:
    """Extents of every parameter (by number in `parameters(model)`) for what a slot holds."""

    def __init__(self, model: ModelConfig, held: Held) -> None:
        self.held = held
        self.num_units = {family: num_units(model, family) for family in FAMILIES}
        self.parameters = parameters(model)
        extents: dict[int, Extent] = {}
        offset = 0
        for norms in (False, True):
            for number, parameter in enumerate(self.parameters):
                if (parameter.group == "norms") == norms:
                    extents[number] = Extent(parameter, offset, len(held[parameter.family]))
                    offset = extents[number].stop
            offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
            if not norms:
                self.matrices = offset
        self.extents = tuple(extents[number] for number in range(len(self.parameters)))
        self.elements = offset

    def decayed(self, no_decay: Sequence[str]) -> tuple[slice, ...]:
        """Ranges of the flat buffers that weight decay is for; `no_decay`: groups it is not for."""
        return _merged(
            slice(extent.start, extent.stop)
            for extent in self.extents
            if extent.parameter.group not in no_decay
        )

    def spans(self, units: Held) -> tuple[slice, ...]:
        """Ranges of the flat buffers that hold the rows of `units`, merged where they touch."""
        return _merged(
            extent.slice(first, last)
            for extent in self.extents
            for first, last in runs(
                self.held[extent.parameter.family], units[extent.parameter.family]
            )
        )


def _merged(spans: Iterable[slice]) -> tuple[slice, ...]:
    merged: list[slice] = []
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        if merged and merged[-1].stop == span.start:
            merged[-1] = slice(merged[-1].start, span.stop)
        else:
            merged.append(span)
    return tuple(merged)


class State:
    """Flat buffers over one `StateLayout`, and how far this rank has come.

    applied_step: optimizer steps applied; every unit has had the same number, so it is also AdamW's
        step counter. synced: `grads` are the synchronised gradients of step `applied_step`.
    grad_norm: norm of the last applied step.
    """

    def __init__(
        self, layout: StateLayout, *, applied_step: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.layout = layout
        self.params, self.grads, self.exp_avg, self.exp_avg_sq = (
            torch.zeros(layout.elements, device=device, dtype=dtype) for _ in range(4)
        )
        self.applied_step = applied_step
        self.synced = False
        self.grad_norm: float | None = None

    def moving(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The buffers that belong to a unit and move with it."""
        return self.params, self.exp_avg, self.exp_avg_sq

    def rows(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """One parameter in a flat buffer, as a view `(local units, *row)`."""
        extent = self.layout.extents[number]
        return flat[extent.start : extent.stop].view(extent.rows, *extent.parameter.row)

    def units(self) -> dict[tuple[str, int, int], torch.Tensor]:
        """State by (parameter, layer, unit): a copy `(3, *row)` of values and both moments."""
        return {
            (parameter.name, parameter.layer, unit): torch.stack(
                [self.rows(flat, number)[row] for flat in self.moving()]
            )
            for number, parameter in enumerate(self.layout.parameters)
            for row, unit in enumerate(self.layout.held[parameter.family])
        }

    def initialise(self, model: ModelConfig, seed: int) -> None:
        """Set the initial parameters: a function of seed and logical unit, not of the layout."""
        for number, parameter in enumerate(self.layout.parameters):
            rows = self.rows(self.params, number)
            for row, unit in enumerate(self.layout.held[parameter.family]):
                rows[row].copy_(initial_row(model, parameter, unit, seed))


def initial_row(model: ModelConfig, parameter: Parameter, unit: int, seed: int) -> torch.Tensor:
    """Initial values of one unit's row, float32, shape `parameter.row`.

    Norms start at one. Matrices are normal with variance 1 / fan-in; the two that write to the
    residual stream are scaled down by sqrt(2 * layers). Rows beyond the vocabulary are zero.
    """
    if parameter.family == "replicated":
        return torch.ones(parameter.row)
    key = f"{seed}/{parameter.name}/{parameter.layer}/{unit}".encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
    values = torch.randn(parameter.row, generator=torch.Generator().manual_seed(number))
    fan_in = {
        "wo": model.num_query_heads * model.head_dim,
        "down": model.mlp_hidden,
    }.get(parameter.name, model.hidden)
    scale = fan_in**-0.5
    if parameter.name in ("wo", "down"):
        scale *= (2 * model.num_layers) ** -0.5
    values *= scale
    if parameter.family == "vocab":
        values[max(0, model.vocab - unit * model.vocab_block) :] = 0.0
    return values
