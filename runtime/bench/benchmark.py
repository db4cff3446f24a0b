"""What a benchmark is: a name, a measurement, and the targets its figures are held against.

A missed target is a finding, not an error: it is told in the table and the command still succeeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One figure and the most it may be. why: how `at_most` comes about, in words."""

    figure: str
    at_most: float
    why: str

    def is_reached(self, figures: Figures) -> bool:
        value = figures.get(self.figure)
        return isinstance(value, int | float) and value <= self.at_most


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One measurement. `measure` tells its progress line by line and returns figures that JSON can
    hold; `targets` says what they are held against. measure_full: the long variant, if there
    is one."""

    name: str
    summary: str
    measure: Callable[[Say], dict[str, Any]]
    targets: Callable[[Figures], Sequence[Target]]
    measure_full: Callable[[Say], dict[str, Any]] | None = None
