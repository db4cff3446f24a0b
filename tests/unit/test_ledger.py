"""The goodput ledger: exact partition, jitter, waiting, failures, restoring."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import PlanError
from runtime.plan.ledger import Ledger, Span
from storage.records import BUCKETS

START = 1_790_000_000.0


def spent(ledger: Ledger, now: float) -> dict[str, float]:
    """Buckets that hold anything, to the millisecond."""
    return {b: round(s, 3) for b, s in ledger.totals(START + now).items() if s > 1e-6}


def started(at: float = 3.0) -> Ledger:
    """A ledger whose first step of 1 s was committed at `at` seconds."""
    ledger = Ledger(START)
    ledger.committed(START + at, 1.0, tokens=100)
    return ledger


def test_starting_lasts_until_the_first_step() -> None:
    assert spent(started(), 3.0) == {"starting": 2.0, "productive": 1.0}


def test_the_first_step_of_a_phase_keeps_its_own_excess() -> None:
    ledger = Ledger(START)
    ledger.committed(START + 4.0, 1.0, tokens=100, step_s=1.5)
    assert spent(ledger, 4.0) == {"starting": 2.5, "productive": 1.0, "degraded": 0.5}


@pytest.mark.parametrize(
    ("waiting", "bucket"), [(False, "degraded"), (True, "waiting_for_approval")]
)
def test_excess_over_the_ideal(waiting: bool, bucket: str) -> None:
    ledger = started()
    for step in range(4):
        ledger.committed(START + 5.0 + 2.0 * step, 1.0, tokens=100, waiting=waiting)
    assert spent(ledger, 11.0) == {"starting": 2.0, "productive": 5.0, bucket: 4.0}
    assert ledger.time_goodput(START + 11.0) == pytest.approx(5 / 11)
    assert ledger.token_goodput(START + 11.0, 100.0) == pytest.approx(5 / 11)


def test_a_rejected_proposal_turns_waiting_into_degraded() -> None:
    ledger = started()
    ledger.committed(START + 5.0, 1.0, tokens=100, waiting=True)
    ledger.committed(START + 7.0, 1.0, tokens=100)
    spans = [(s.bucket, s.end - s.begin, s.tokens) for s in ledger.drain(everything=True)]
    assert spans == [
        ("starting", 2.0, 0),
        ("productive", 2.0, 200),
        ("waiting_for_approval", 1.0, 0),
        ("productive", 1.0, 100),
        ("degraded", 1.0, 0),
    ]


def test_jitter_around_the_ideal_cancels_out() -> None:
    ledger, at = started(), 3.0
    for step in range(100):
        at += 0.9 if step % 2 == 0 else 1.1
        ledger.committed(START + at, 1.0, tokens=100)
    assert spent(ledger, at) == {"starting": 2.0, "productive": 101.0}


def test_credit_is_bounded_so_that_quick_steps_never_hide_a_slow_hour() -> None:
    ledger, at = started(), 3.0
    for _ in range(1000):
        at += 0.5
        ledger.committed(START + at, 1.0, tokens=100)
    at += 10.0
    ledger.committed(START + at, 1.0, tokens=100)
    assert spent(ledger, at)["degraded"] == 8.0


@pytest.mark.parametrize(("took", "degraded"), [(1.02, 0.0), (1.03, 0.01)])
def test_tolerance_of_a_healthy_shape(took: float, degraded: float) -> None:
    ledger = started()
    ledger.committed(START + 3.0 + took, 1.0, tokens=100, healthy=True)
    assert spent(ledger, 3.0 + took).get("degraded", 0.0) == degraded
    ledger = started()
    ledger.committed(START + 3.0 + took, 1.0, tokens=100)
    assert spent(ledger, 3.0 + took)["degraded"] == round(took - 1.0, 3)


def test_failure_throws_a_step_away() -> None:
    ledger = started()
    ledger.failed(START + 3.7, START + 3.5)
    ledger.committed(START + 5.2, 1.0, tokens=100)
    assert spent(ledger, 5.2) == {
        "starting": 2.0,
        "productive": 2.0,
        "recomputing": 0.5,
        "detecting": 0.2,
        "reconfiguring": 0.5,
    }


def test_failure_rolled_forward_keeps_the_step() -> None:
    ledger = started()
    ledger.failed(START + 4.2, START + 4.0, rolled_forward=True, ideal_step_s=1.0, tokens=100)
    assert spent(ledger, 4.2) == {"starting": 2.0, "productive": 2.0, "detecting": 0.2}
    assert ledger.tokens == 200


def test_failure_while_reconfiguring_stays_reconfiguring() -> None:
    ledger = started()
    ledger.failed(START + 3.2, START + 3.0)
    ledger.failed(START + 4.2, START + 4.0)
    assert spent(ledger, 5.0) == {
        "starting": 2.0,
        "productive": 1.0,
        "detecting": 0.4,
        "reconfiguring": 1.6,
    }


def test_planned_reconfiguration_pause_and_stop() -> None:
    ledger = started()
    ledger.reconfigured(START + 3.1)
    ledger.committed(START + 5.0, 1.0, tokens=100)
    ledger.paused(START + 5.0)
    assert spent(ledger, 8.0)["paused"] == 3.0
    ledger.stopped(START + 9.0)
    assert spent(ledger, 9.0) == {
        "starting": 2.0,
        "productive": 2.0,
        "reconfiguring": 1.0,
        "paused": 4.0,
    }


def test_checkpointing_is_spent_on_its_own() -> None:
    ledger = started()
    ledger.spend("checkpointing", START + 3.5)
    ledger.committed(START + 4.5, 1.0, tokens=100)
    assert spent(ledger, 4.5)["checkpointing"] == 0.5


def test_late_times_are_moved_up_and_keep_their_tokens() -> None:
    ledger = started()
    ledger.committed(START + 1.0, 1.0, tokens=100)
    ledger.failed(START + 2.0, START - 5.0)
    assert spent(ledger, 3.0) == {"starting": 2.0, "productive": 1.0}
    spans = ledger.drain(everything=True)
    assert sum(span.tokens for span in spans) == ledger.tokens == 200


def test_drain_pools_steps_up_to_five_seconds() -> None:
    ledger, drained = started(), []
    for step in range(1, 21):
        ledger.committed(START + 3.0 + 1.25 * step, 1.0, tokens=100)
        drained += ledger.drain()
    assert [s.bucket for s in drained] == ["starting"] + ["productive", "degraded"] * (
        len(drained) // 2
    )
    assert len(drained) <= 1 + 2 * 6
    assert all(s.end - s.begin <= 6.0 for s in drained)


def test_restored_goes_on_where_it_ended() -> None:
    ledger = started()
    ledger.committed(START + 5.0, 1.0, tokens=100)
    again = Ledger.restored(START, ledger.totals(ledger.marked_at), tokens=ledger.tokens)
    assert again.marked_at == ledger.marked_at
    assert again.totals(START + 5.0) == ledger.totals(START + 5.0)
    for one in (ledger, again):
        one.spend("unknown", START + 6.0)
        one.committed(START + 7.0, 1.0, tokens=100)
    assert again.totals(START + 7.0) == ledger.totals(START + 7.0)
    with pytest.raises(PlanError):
        Ledger.restored(START, {"productive": -1.0}, tokens=0)


def test_a_year_adds_up() -> None:
    ledger, at = started(), 3.0
    for step in range(20_000):
        at += 1000.0 + (step % 7) / 7.0
        ledger.committed(START + at, 999.9, tokens=1)
    assert abs(sum(ledger.totals(START + at).values()) - ledger.wall_s(START + at)) < 1e-6


SECONDS = st.floats(min_value=-3.0, max_value=20.0, allow_nan=False)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["commit", "wait", "healthy", "fail", "roll", "reconfigure", "pause", "stop", "spend"]
        ),
        SECONDS,
        SECONDS,
        st.floats(min_value=0.0, max_value=5.0),
        st.booleans(),
    ),
    max_size=40,
)


def play(ledger: Ledger, kind: str, at: float, other: float, ideal: float) -> None:
    """Report one random event."""
    if kind in ("commit", "wait", "healthy"):
        step_s = None if other < 0 else other
        ledger.committed(
            at, ideal, tokens=7, step_s=step_s, waiting=kind == "wait", healthy=kind == "healthy"
        )
    elif kind in ("fail", "roll"):
        ledger.failed(at, at + other, rolled_forward=kind == "roll", ideal_step_s=ideal, tokens=7)
    elif kind == "reconfigure":
        ledger.reconfigured(at)
    elif kind == "pause":
        ledger.paused(at)
    elif kind == "stop":
        ledger.stopped(at)
    else:
        ledger.spend("checkpointing", at)


@given(events=EVENTS)
def test_buckets_partition_wall_time_whatever_happens(
    events: list[tuple[str, float, float, float, bool]],
) -> None:
    ledger, now = Ledger(START), START
    spans: list[Span] = []
    for kind, forward, other, ideal, drains in events:
        now += forward
        play(ledger, kind, now, other, ideal)
        totals = ledger.totals(now)
        assert set(totals) == set(BUCKETS)
        assert min(totals.values()) >= 0.0
        assert math.isclose(sum(totals.values()), ledger.wall_s(now), abs_tol=1e-6)
        assert 0.0 <= ledger.time_goodput(now) <= 1.0
        if drains:
            spans += ledger.drain()
    spans += ledger.drain(everything=True)
    edge = START
    for span in spans:
        assert span.begin == edge
        assert span.end >= span.begin
        edge = span.end
    assert edge == ledger.marked_at
    assert sum(span.tokens for span in spans) == ledger.tokens
    totals = ledger.totals(ledger.marked_at)
    for bucket in BUCKETS:
        length = sum(span.end - span.begin for span in spans if span.bucket == bucket)
        assert math.isclose(length, totals[bucket], abs_tol=1e-5)
