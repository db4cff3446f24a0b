"""What dropping replicas would have given."""

from __future__ import annotations

import pytest

from storage.history.counterfactual import against_drop
from storage.history.incident_costs import Pace
from tests.unit.test_incidents import GENERATIONS, PACES


def test_a_reduced_replica_counts_nothing_when_it_would_have_been_dropped() -> None:
    paces = PACES | {4: Pace(num_steps=90, tokens=9_000, step_s=90.0)}
    found = against_drop(GENERATIONS, paces, 300.0)
    assert found is not None
    assert found.healthy_tokens_per_s == pytest.approx(100.0)
    assert found.actual == pytest.approx((10_000 + 1_500 + 5_900 + 9_000) / 30_000)
    assert found.dropped == pytest.approx((10_000 + 0.5 * 3_000 + 0.5 * 6_600 + 9_000) / 30_000)


def test_without_a_healthy_generation_nothing_is_claimed() -> None:
    assert against_drop(GENERATIONS[1:3], PACES, 300.0) is None
    assert against_drop([], {}, 1.0) is None
