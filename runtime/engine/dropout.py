"""Which activations of a step are dropped: a function of what they are, never of who computes them.

A mask is keyed by (seed, layer, family, logical unit, sample) and the position in the unit; a
sample belongs to one step, so its number says that too. Whatever the shape, the split of samples or
recomputation, the same mask comes out.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_BITS = 24
_FAMILIES = ("attention", "mlp")


class Dropout:
    """Drops values at `rate` and scales the others up by 1 / (1 - rate)."""

    def __init__(self, rate: float, seed: int) -> None:
        self._scale = 1.0 / (1.0 - rate)
        self._threshold = round(rate * 2**_BITS)
        self._seed = seed

    def __call__(
        self, x: torch.Tensor, layer: int, family: str, units: torch.Tensor, samples: torch.Tensor
    ) -> torch.Tensor:
        """`x` with values dropped.

        Args:
            x: `(batch, time, units * width)`, units side by side.
            units: which, int64 `(units,)`. samples: their numbers in the run, int64 `(batch,)`.
        """
        if not x.numel():
            return x
        batch, time, wide = x.shape
        kept = self.kept(layer, family, units, samples, time, wide // len(units))
        return x.masked_fill(~kept.view(batch, time, wide), 0.0) * self._scale

    @torch.no_grad()
    def kept(
        self, layer: int, family: str, units: torch.Tensor, samples: torch.Tensor, time: int,
        width: int,
    ) -> torch.Tensor:  # fmt: skip
        """Which values stay, bool `(batch, time, units, width)`."""
        base = self._seed * 1_000_003 + layer * len(_FAMILIES) + _FAMILIES.index(family)
        key = _mixed(units * _signed(_GOLDEN) + _signed(base * _MIX_1))
        key = _mixed(samples.view(-1, 1) * _signed(_MIX_2) + key)
        position = torch.arange(time * width, device=samples.device).view(1, time, 1, width)
        bits = _mixed(position * _signed(_GOLDEN) + key.view(len(samples), 1, -1, 1))
        return _shifted(bits, 64 - _BITS) >= self._threshold


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """splitmix64's finish, in place, on int64 (whose products wrap)."""
    z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(_MIX_1))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(_MIX_2))
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right; int64's own keeps the sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63
