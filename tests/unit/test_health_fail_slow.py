"""The fail-slow detector: what it finds, how soon, and what it must not take for slowness."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.health.fail_slow import Slow, SlowDetector
from runtime.health.step_times import StepTimes, StepTimesError, is_step_times

JOB1 = Path(__file__).parents[3] / "shared" / "data" / "minibatch_times_job1.csv"
Times = np.ndarray[tuple[int, int], np.dtype[np.float64]]
GROUPS = {str(worker): worker // 8 for worker in range(16)}


def noisy(rng: np.random.Generator, sigma: float = 0.04, rounds: int = 300) -> Times:
    """Times of 16 workers (rounds, workers), each with a usual pace of its own."""
    own = 1.0 + 0.05 * rng.standard_normal(16)
    return np.exp(sigma * rng.standard_normal((rounds, 16))) * own


def watch(times: Times, detector: SlowDetector | None = None) -> list[Slow]:
    detector = detector or SlowDetector(GROUPS)
    for at, row in enumerate(times):
        detector.take(float(at), {str(worker): value for worker, value in enumerate(row)})
    return [*detector.finished, *detector.slow()]


@pytest.mark.parametrize(("factor", "delay"), [(2.0, 4), (1.5, 5), (1.25, 16)])
@pytest.mark.parametrize("seed", range(5))
def test_a_step_change_is_found_soon(factor: float, delay: int, seed: int) -> None:
    times = noisy(np.random.default_rng(seed))
    times[120:, 3] *= factor
    (found,) = watch(times)
    assert (found.worker, found.kind, found.ended) == ("3", "slot", False)
    assert 119 <= found.begin <= 120 + delay
    assert found.found - 120 <= delay
    assert found.ratio == pytest.approx(factor, rel=0.12)


@pytest.mark.parametrize("seed", range(5))
def test_a_slot_slow_from_the_start_is_found(seed: int) -> None:
    times = noisy(np.random.default_rng(seed), rounds=40)
    times[:, 9] *= 1.6
    assert [each.worker for each in watch(times)] == ["9"]


def test_a_slot_that_recovers_is_over() -> None:
    times = noisy(np.random.default_rng(1))
    times[100:150, 5] *= 1.8
    (found,) = watch(times)
    assert (found.worker, found.ended) == ("5", True)
    assert abs(found.end - 149) <= 1


@pytest.mark.parametrize("seed", range(3))
def test_a_drift_is_found_before_it_is_large(seed: int) -> None:
    times = noisy(np.random.default_rng(seed), sigma=0.02)
    times[100:, 2] *= np.linspace(1.0, 1.6, 200)
    found = watch(times)
    assert {each.worker for each in found} == {"2"}
    assert found[0].found < 100 + 130  # 1.39 at the latest


def burst(times: Times, rng: np.random.Generator) -> None:
    """One sample in a hundred is five times as long, anywhere."""
    times[rng.random(times.shape) < 0.01] *= 5.0


def checkpoints(times: Times, _rng: np.random.Generator) -> None:
    """Rank 0 writes every ten steps."""
    times[::10, 0] *= 4.0


def all_wait(times: Times, _rng: np.random.Generator) -> None:
    """A slow input pipeline: everybody, for a while."""
    times[100:160] *= 2.5


def most_wait(times: Times, rng: np.random.Generator) -> None:
    """A slow file system: most of them, others every time."""
    for at in range(100, 160):
        times[at, rng.permutation(16)[:11]] *= 2.0


def ramp(times: Times, _rng: np.random.Generator) -> None:
    """Everybody gets slower and slower."""
    times *= np.linspace(1.0, 2.0, len(times))[:, None]


def nothing(_times: Times, _rng: np.random.Generator) -> None:
    """Noise alone."""


@pytest.mark.parametrize("disturb", [nothing, burst, checkpoints, all_wait, most_wait, ramp])
@pytest.mark.parametrize("seed", range(5))
def test_no_worker_is_blamed(
    disturb: Callable[[Times, np.random.Generator], None], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    times = noisy(rng, rounds=600)
    disturb(times, rng)
    assert [each for each in watch(times) if each.worker] == []


def test_a_global_slowdown_is_told_as_one() -> None:
    times = noisy(np.random.default_rng(0))
    all_wait(times, np.random.default_rng(0))
    (found,) = watch(times)
    assert (found.kind, found.worker, found.ended) == ("global", "", True)
    assert found.ratio == pytest.approx(2.5, rel=0.1)


def test_a_slow_replica_is_told_from_a_slow_slot() -> None:
    times = noisy(np.random.default_rng(0))
    times[100:, 8:] *= 1.5
    found = [each for each in watch(times) if each.worker]
    assert {each.worker for each in found} == {str(worker) for worker in range(8, 16)}
    assert {each.kind for each in found} == {"replica"}


def test_the_first_steps_after_a_reconfiguration_say_little() -> None:
    detector = SlowDetector(GROUPS)
    rng = np.random.default_rng(0)
    watch(noisy(rng), detector)
    detector.reconfigured(GROUPS)
    first = noisy(rng, rounds=100)
    first[:2] *= np.array([3.0] + [1.0] * 15)
    assert watch(first, detector) == []


@pytest.mark.skipif(not JOB1.is_file(), reason="the samples from the field are not here")
def test_worker_6_of_a_real_job() -> None:
    times, detector = StepTimes(), SlowDetector()
    for each in times.rounds(JOB1.read_text().splitlines()):
        detector.take(each.at, each.durations)
    (found,) = [*detector.finished, *detector.slow()]
    assert (found.worker, found.begin, found.end) == ("6", 1811.0, 1941.0)
    assert found.found - found.begin <= 30.0  # Three samples, ten seconds apart.


CSV = """,worker,gpu,time,batch_time_norm
0,0,25,1,476
1,1,25,1,509
2,0,25,11,470
3,one,25,x,509
4,1,25,11,nan
5,1,25,11,500
"""


def test_step_times_by_column_name() -> None:
    times = StepTimes()
    rounds = list(times.rounds(CSV.splitlines()))
    assert [(each.at, each.durations) for each in rounds] == [
        (1.0, {"0": 476.0, "1": 509.0}),
        (11.0, {"0": 470.0, "1": 500.0}),
    ]
    assert times.num_not_understood == 2
    assert is_step_times("worker,time,duration")
    with pytest.raises(StepTimesError, match="no column for the duration"):
        list(StepTimes().rounds(["worker,time,color"]))


@given(st.lists(st.text(max_size=40), max_size=20))
def test_step_times_fuzz(lines: list[str]) -> None:
    times = StepTimes()
    rounds = list(times.rounds(["worker,time,duration", *lines]))
    assert sum(len(each.durations) for each in rounds) <= len("".join(lines)) + len(lines)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abcdef"), st.floats(0, 1e6, allow_nan=False, width=32), max_size=6
        ),
        max_size=40,
    )
)
def test_detector_takes_any_times(rounds: list[dict[str, float]]) -> None:
    detector = SlowDetector({"a": 0, "b": 0, "c": 1})
    for at, durations in enumerate(rounds):
        detector.take(float(at), durations)
    assert all(each.ratio >= 1.0 for each in detector.slow())
