"""Incidents from records: what belongs together, its parts, their cost, and the alternatives."""

from __future__ import annotations

import msgspec
import pytest

from storage.history.incident_costs import Cost, LossCurve, Pace, costs_of
from storage.history.incidents import Incident, incidents_of
from storage.records import (
    DecisionMade,
    EventHappened,
    GenerationFormed,
    LedgerSpent,
    Option,
    Proposal,
    ReplicaState,
)

FAILED_AT, LEFT_OUT_AT, PROPOSED_AT, DECIDED_AT, APPLIED_AT = 100.0, 101.0, 102.0, 132.0, 134.0
BACK_AT, GROWN_AT = 200.0, 205.0


def replica(number: int, live: int, mode: str = "training", boost_w: float = 0.0) -> ReplicaState:
    return ReplicaState(
        replica=number, rack=f"r{number}", mode=mode,  # type: ignore[arg-type]
        gpus=tuple(f"r{number}/{slot}" for slot in range(4)), live=tuple(range(live)),
        num_samples=8, units={}, boost_w=boost_w,
    )  # fmt: skip


def formed(
    number: int, at: float, *replicas: ReplicaState, cause: str = "", proposal: str = ""
) -> GenerationFormed:
    return GenerationFormed(
        seq=number * 10, at=at, run="x", generation=number, first_step=int(at),
        replicas=replicas, cause=cause, proposal=proposal,
    )  # fmt: skip


def event(
    seq: int, at: float, kind: str, gpu: str | None, severity: str = "critical"
) -> EventHappened:
    return EventHappened(
        seq=seq, at=at, run="x", kind=kind, severity=severity,  # type: ignore[arg-type]
        message=f"{gpu} {kind}", gpu=gpu,
    )  # fmt: skip


def option(kind: str, shape: tuple[tuple[int, ...], ...], goodput: float) -> Option:
    return Option(
        kind=kind, title=f"{kind}: details", shape=shape, samples=(8, 8), step_s=1.0,  # type: ignore[arg-type]
        tokens_per_s=100 * goodput, goodput=goodput, cost_s=2.0 if kind != "carry_on" else 0.0,
        risk="none",
    )  # fmt: skip


WHOLE, REDUCED = tuple(range(4)), tuple(range(3))
OPTIONS = (
    option("carry_on", (WHOLE, ()), 0.4),
    option("shrink", (WHOLE, REDUCED), 0.9),
)


def proposed(name: str, at: float, decided_at: float | None, state: str = "applied") -> Proposal:
    return Proposal(
        id=name, run="x", generation=2, revision=3, created_at=at, expires_at=at + 300,
        replica=1, kind="shrink", cause="r1/3 failed", before=(), options=OPTIONS, recommended=1,
        state=state, chosen=1 if state == "applied" else None, decided_at=decided_at,  # type: ignore[arg-type]
        evidence=((99.0, "peers saw it go"),),
    )  # fmt: skip


GENERATIONS = [
    formed(1, 0.0, replica(0, 4), replica(1, 4), cause="started"),
    formed(2, LEFT_OUT_AT, replica(0, 4), replica(1, 3, "standby"), cause="r1/3 failed"),
    formed(3, APPLIED_AT, replica(0, 4), replica(1, 3), cause="shrunk", proposal="p1"),
    formed(4, GROWN_AT, replica(0, 4), replica(1, 4), cause="grown", proposal="p2"),
]
EVENTS = [
    event(15, FAILED_AT, "gpu_failed", "r1/3"),
    event(35, BACK_AT, "gpu_repaired", "r1/3", "info"),
]
PROPOSALS = [proposed("p1", PROPOSED_AT, DECIDED_AT), proposed("p2", BACK_AT + 1, BACK_AT + 2)]
DECISIONS = [
    DecisionMade(
        seq=20, at=DECIDED_AT, run="x", id="c", proposal="p1", generation=2, verdict="approved",
        option=1, who="ann", via="browser", reason="",
    )
]  # fmt: skip
LEDGER = [
    LedgerSpent(seq=i, at=0.0, run="x", bucket=bucket, begin=begin, end=end)  # type: ignore[arg-type]
    for i, (bucket, begin, end) in enumerate(
        [
            ("productive", 0.0, 99.0),
            ("detecting", 99.0, 100.0),
            ("reconfiguring", 100.0, 101.0),
            ("productive", 101.0, 116.5),
            ("waiting_for_approval", 116.5, 132.0),
            ("reconfiguring", 132.0, 134.0),
            ("productive", 134.0, 193.4),
            ("degraded", 193.4, 200.0),
            ("productive", 200.0, 203.0),
            ("reconfiguring", 203.0, 205.0),
            ("productive", 205.0, 300.0),
        ]
    )
]
PACES = {
    1: Pace(num_steps=100, tokens=10_000, step_s=100.0),
    2: Pace(num_steps=15, tokens=1_500, step_s=30.0),
    3: Pace(num_steps=59, tokens=5_900, step_s=66.0),
}


def the_incident() -> Incident:
    (found,) = incidents_of(GENERATIONS, EVENTS, PROPOSALS, DECISIONS, 300.0)
    return found


def the_cost(incident: Incident) -> Cost:
    costs = costs_of([incident], GENERATIONS, PROPOSALS, LEDGER, PACES, 300.0)
    return costs[incident.id]


def test_it_goes_from_the_first_evidence_to_the_verified_recovery() -> None:
    incident = the_incident()
    assert (incident.begin, incident.end) == (99.0, GROWN_AT)
    assert (incident.replica, incident.gpus, incident.id) == (1, ("r1/3",), "i15")
    assert incident.proposals == ("p1", "p2")
    assert "committed step 205 with all 4 slots" in incident.verified
    kinds = [moment.kind for moment in incident.moments]
    assert kinds[:2] == ["evidence", "event"]
    assert kinds[-1] == "recovery"
    assert any("approved by ann" in moment.text for moment in incident.moments)


def test_every_instant_belongs_to_one_part() -> None:
    stretches = the_incident().stretches
    assert [(one.part, one.begin, one.end) for one in stretches] == [
        ("detected", 99.0, FAILED_AT),
        ("proposed", FAILED_AT, PROPOSED_AT),
        ("waited", PROPOSED_AT, DECIDED_AT),
        ("applied", DECIDED_AT, APPLIED_AT),
        ("reduced", APPLIED_AT, BACK_AT),
        ("proposed", BACK_AT, BACK_AT + 1),
        ("waited", BACK_AT + 1, BACK_AT + 2),
        ("applied", BACK_AT + 2, GROWN_AT),
    ]


def test_parts_cost_what_the_ledger_lost_in_them() -> None:
    cost = the_cost(the_incident())
    parts = {one.part: one for one in cost.parts}
    assert parts["detected"].gpu_hours == pytest.approx(1.0 * 8 / 3600)
    assert parts["waited"].gpu_hours == pytest.approx(15.0 * 8 / 3600)
    assert parts["applied"].gpu_hours == pytest.approx(4.0 * 8 / 3600)
    assert parts["reduced"].gpu_hours == pytest.approx(6.6 * 8 / 3600)
    lost = sum(one.end - one.begin for one in LEDGER if one.bucket != "productive")
    assert cost.gpu_hours == pytest.approx(lost * 8 / 3600)


def test_alternatives_use_what_the_run_measured() -> None:
    cost = the_cost(the_incident())
    carried_on, shrunk, at_once = cost.alternatives
    assert carried_on.goodput == pytest.approx(0.5), "measured, not the predicted 0.4"
    assert "measured in generation 2 (15 steps)" in carried_on.basis
    # 2 s until it was proposed and half of each second after that, and half of a second before
    assert carried_on.gpu_hours == pytest.approx((2.5 + 0.5 * 103) * 8 / 3600)
    assert shrunk.goodput == pytest.approx((5900 / 66) / 100)
    assert at_once.gpu_hours < cost.gpu_hours < carried_on.gpu_hours


def test_without_measurements_the_prediction_is_said_to_be_one() -> None:
    incident = the_incident()
    cost = costs_of([incident], GENERATIONS, PROPOSALS, LEDGER, {}, 300.0)[incident.id]
    assert cost.alternatives[0].goodput == 0.4
    assert cost.alternatives[0].basis == "predicted by the planner"


def test_an_open_incident_lasts_until_now() -> None:
    waiting = proposed("p1", PROPOSED_AT, None, "open")
    (incident,) = incidents_of(GENERATIONS[:2], EVENTS[:1], [waiting], [], 120.0)
    assert incident.is_open
    assert incident.stretches[-1].part == "waited"
    assert incident.stretches[-1].end == 120.0


def test_a_slow_gpu_is_an_incident_until_it_is_cleared() -> None:
    slow = event(15, 50.0, "gpu_slow", "r1/2", "warning")
    other = formed(2, 60.0, replica(0, 3), replica(1, 4), cause="another replica changed")
    (incident,) = incidents_of([GENERATIONS[0], other], [slow], [], [], 90.0)
    assert incident.is_open
    cleared = event(25, 80.0, "gpu_repaired", "r1/2", "info")
    (incident,) = incidents_of([GENERATIONS[0], other], [slow, cleared], [], [], 90.0)
    assert incident.end == 80.0


def test_incidents_of_two_replicas_share_the_loss() -> None:
    second = event(16, FAILED_AT, "gpu_failed", "r0/1")
    both = incidents_of(GENERATIONS[:2], [EVENTS[0], second], [], [], 132.0)
    assert [one.replica for one in both] == [1, 0]
    costs = costs_of(both, GENERATIONS, [], LEDGER, PACES, 132.0)
    lost = LossCurve(LEDGER).between(FAILED_AT, 132.0)
    assert sum(one.gpu_hours for one in costs.values()) == pytest.approx(lost * 8 / 3600)


def test_events_without_a_place_begin_nothing() -> None:
    quiet = [
        msgspec.structs.replace(EVENTS[0], gpu=None),
        event(16, 100.0, "cap_changed", "r0/1", "info"),
        event(17, 100.0, "gpu_failed", "unheard-of/1"),
    ]
    assert incidents_of(GENERATIONS, quiet, [], [], 300.0) == []
