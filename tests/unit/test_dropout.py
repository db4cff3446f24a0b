"""Dropout masks depend on what is dropped alone."""

from __future__ import annotations

import pytest
import torch

from runtime.config import TrainConfig
from runtime.engine.dropout import Dropout

DROPOUT = Dropout(0.25, seed=7)
UNITS = torch.arange(6)
SAMPLES = torch.arange(100, 108)


def kept(dropout: Dropout = DROPOUT, layer: int = 1, family: str = "mlp", **more: torch.Tensor):  # type: ignore[no-untyped-def]
    units, samples = more.get("units", UNITS), more.get("samples", SAMPLES)
    return dropout.kept(layer, family, units, samples, 32, 16)


def test_any_part_of_a_mask_is_that_part_of_the_whole() -> None:
    whole = kept()
    some, few = torch.tensor([5, 0, 3]), torch.tensor([2, 7])
    assert torch.equal(kept(units=UNITS[some], samples=SAMPLES[few]), whole[few][:, :, some])


def test_the_rate_holds_in_every_row() -> None:
    whole = kept().double()
    assert whole.mean().item() == pytest.approx(0.75, abs=0.01)
    for each in (0, 1, 2, 3):
        others = [at for at in range(4) if at != each]
        assert whole.mean(others).sub(0.75).abs().max().item() < 0.06, each


@pytest.mark.parametrize(
    "other",
    [
        {"dropout": Dropout(0.25, seed=8)},
        {"layer": 2},
        {"family": "attention"},
        {"units": UNITS + 6},
        {"samples": SAMPLES + 8},
    ],
    ids=["seed", "layer", "family", "unit", "sample"],
)
def test_whatever_differs_gives_an_independent_mask(other: dict[str, object]) -> None:
    one, two = kept().double() - 0.75, kept(**other).double() - 0.75  # type: ignore[arg-type]
    correlation = (one * two).mean() / (0.75 * 0.25)
    assert abs(correlation.item()) < 0.02


def test_positions_of_a_unit_are_independent() -> None:
    mask = kept().double() - 0.75
    for shift, dim in ((1, 1), (1, 3), (1, 2), (1, 0)):
        moved = torch.roll(mask, shift, dim)
        assert abs((mask * moved).mean().item()) / (0.75 * 0.25) < 0.02


def test_what_stays_is_scaled_so_that_the_mean_is_kept() -> None:
    x = torch.ones(8, 32, 6 * 16, dtype=torch.float64, requires_grad=True)
    out = DROPOUT(x, 1, "mlp", UNITS, SAMPLES)
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75}
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())  # type: ignore[arg-type]


def test_nothing_to_drop_from() -> None:
    empty = torch.ones(8, 32, 0)
    assert DROPOUT(empty, 0, "attention", UNITS[:0], SAMPLES) is empty


def test_seeds_and_samples_of_any_size() -> None:
    huge = Dropout(0.5, seed=2**62 + 5)
    mask = huge.kept(99, "attention", UNITS, torch.tensor([2**40, 2**40 + 1]), 32, 16).double()
    assert mask.mean().item() == pytest.approx(0.5, abs=0.02)


def test_a_rate_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`dropout` is 1.0; allowed: 0 or more, below 1"):
        TrainConfig(dropout=1.0)
