"""The batch plan: exact optimum, ties, bounds."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import PlanError
from runtime.plan.batch import apportion, makespan


@pytest.mark.parametrize(
    ("batch", "speeds", "samples"),
    [
        (16, (1.0, 1.0), (8, 8)),
        (16, (1.0, 0.0), (16, 0)),
        (16, (1.0, 7 / 8), (9, 7)),
        (16, (1.0, 1.0, 1.0), (6, 5, 5)),
        (1, (1.0, 1.0), (1, 0)),
        (0, (1.0,), (0,)),
        (8, (30 / 32, 1.0), (4, 4)),
    ],
)
def test_shares(batch: int, speeds: tuple[float, ...], samples: tuple[int, ...]) -> None:
    assert apportion(batch, speeds) == samples


@pytest.mark.parametrize("speeds", [(), (0.0, 0.0), (-1.0, 1.0), (math.nan,), (math.inf, 1.0)])
def test_impossible_speeds(speeds: tuple[float, ...]) -> None:
    with pytest.raises(PlanError):
        apportion(4, speeds)


def test_a_large_run() -> None:
    speeds = [1.0 if index % 8 else 28 / 32 for index in range(128)]
    samples = apportion(1024, speeds)
    assert sum(samples) == 1024
    # FACTS 1: at TP28 a local batch of 8 goes to 6 or 7, the rest takes the odd samples.
    assert set(samples) <= {6, 7, 8, 9}


@given(
    batch=st.integers(min_value=1, max_value=9),
    speeds=st.lists(
        st.one_of(st.just(0.0), st.floats(min_value=0.01, max_value=100.0)),
        min_size=1,
        max_size=4,
    ).filter(any),
)
def test_optimal_against_brute_force(batch: int, speeds: list[float]) -> None:
    samples = apportion(batch, speeds)
    assert sum(samples) == batch
    assert min(samples) >= 0
    every = itertools.product(range(batch + 1), repeat=len(speeds))
    best = min(
        makespan(split, speeds)
        for split in every
        if sum(split) == batch
        and all(count == 0 or speed > 0 for count, speed in zip(split, speeds, strict=True))
    )
    assert makespan(samples, speeds) == best


@given(
    batch=st.integers(min_value=1, max_value=5000),
    speeds=st.lists(st.floats(min_value=0.1, max_value=2.0), min_size=1, max_size=128),
)
def test_no_sample_would_be_better_elsewhere(batch: int, speeds: list[float]) -> None:
    samples = apportion(batch, speeds)
    assert sum(samples) == batch
    slowest = makespan(samples, speeds)
    moved = min((count + 1) / speed for count, speed in zip(samples, speeds, strict=True))
    assert moved >= slowest
