"""The peers of the steady-state comparison train exactly what ours trains."""

from __future__ import annotations

from runtime.bench.peers import comparison


def test_all_programs_have_the_same_losses() -> None:
    result = comparison.steady(1, 2, 0.1, lambda _: None)
    assert set(result.step_s) == {"ours", "bare", "dtensor"}
    assert comparison._loss_difference(result) < 1e-5
