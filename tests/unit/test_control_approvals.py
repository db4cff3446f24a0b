"""Who may approve, how many it takes, on evidence how old; what refusals say; and undoing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from runtime.config import PolicyConfig
from runtime.plan.policy_config import Approvals, Deciders
from storage.commands import CommandResult, Decide
from storage.identity import Role, Writer, refusal, sign
from storage.records import Proposal
from tests.support.control_cluster import SimCluster, refused, running, waiting
from tests.support.control_restart import restart_controller

TWO = PolicyConfig(approvals=Approvals(shrink=2, drop=2, grow=2))
KEYS: dict[Writer, bytes] = {"app": b"a" * 32, "cli": b"c" * 32}


def newest(cluster: SimCluster, proposal: Proposal) -> Proposal:
    return cluster.proposals[proposal.id]


# two people --------------------------------------------------------------------------------------


def test_two_people_must_approve() -> None:
    cluster, proposal = waiting(policy=TWO)
    assert (proposal.approvals_needed, proposal.approvals_left) == (2, 2)
    assert proposal.ruling.endswith("needs 2 approvals by different people")
    first = cluster.decide(proposal, who="ada")
    assert first.ok
    assert "1 of 2 approvals, by ada: 1 more needed" in first.message
    half = newest(cluster, proposal)
    assert (half.state, half.approvals_left) == ("open", 1)
    assert half.revision > proposal.revision
    cluster.run_steps(3)
    assert newest(cluster, proposal).state == "open"
    assert cluster.decide(half, who="bob").ok
    cluster.run_steps(3)
    done = newest(cluster, proposal)
    assert (done.state, [one.who for one in done.approvals]) == ("applied", ["ada", "bob"])
    assert done.decided_by == "ada and bob"
    assert [(d.who, d.verdict) for d in cluster.decisions] == [
        ("ada", "approved_in_part"),
        ("bob", "approved"),
    ]
    cluster.check()


def test_the_same_person_twice_counts_once() -> None:
    cluster, proposal = waiting(policy=TWO)
    assert cluster.decide(proposal, who="ada").ok
    again = cluster.decide(newest(cluster, proposal), who="ada")
    assert refused(cluster, "not_allowed")
    assert "ada has approved it already; another person must (1 of 2 approvals" in again.message
    assert len(newest(cluster, proposal).approvals) == 1
    cluster.check()


def test_two_who_click_at_the_same_moment_are_two() -> None:
    """Both answer the form of the proposal that nobody had approved yet."""
    cluster, proposal = waiting(policy=TWO)
    assert cluster.decide(proposal, who="ada").ok
    assert cluster.decide(proposal, who="bob").ok
    cluster.decide(proposal, who="cyd")
    assert refused(cluster, "decided")
    cluster.run_steps(3)
    assert newest(cluster, proposal).state == "applied"
    cluster.check()


def test_who_asked_for_it_cannot_approve_it_where_two_must() -> None:
    cluster, _ = waiting(policy=TWO)
    assert cluster.trigger(0, "drop").ok
    asked = cluster.wait_for_proposal(0)
    assert asked.asked_by == "ada"
    result = cluster.decide(asked, who="ada")
    assert refused(cluster, "not_allowed")
    assert "ada asked for it and cannot approve it too" in result.message
    assert cluster.decide(newest(cluster, asked), who="bob").ok
    assert cluster.decide(newest(cluster, asked), who="cyd").ok
    cluster.run_steps(2)
    assert newest(cluster, asked).state == "applied"
    cluster.check()


def test_where_one_is_enough_who_asked_may_approve() -> None:
    cluster, _ = waiting()
    assert cluster.trigger(0, "drop").ok
    assert cluster.decide(cluster.wait_for_proposal(0), who="ada").ok


def test_both_must_approve_the_same_option() -> None:
    cluster, proposal = waiting(policy=TWO)
    assert cluster.decide(proposal, who="ada").ok
    other = next(
        i for i, o in enumerate(proposal.options) if o.feasible and i != proposal.recommended
    )
    result = cluster.decide(newest(cluster, proposal), option=other, who="bob")
    assert refused(cluster, "invalid")
    assert "ada approved 'Shrink replica 0" in result.message
    cluster.check()


def test_one_no_is_enough() -> None:
    cluster, proposal = waiting(policy=TWO)
    assert cluster.decide(proposal, who="ada").ok
    assert cluster.decide(newest(cluster, proposal), "rejected", who="bob").ok
    assert newest(cluster, proposal).state == "rejected"
    cluster.run_steps(2)
    assert cluster.shape() == [(), (0, 1, 2)]


def test_approvals_expire_with_their_proposal() -> None:
    policy = msgspec.structs.replace(TWO, expires_s=5.0)
    cluster, proposal = waiting(policy=policy)
    assert cluster.decide(proposal, who="ada").ok
    cluster.run(5.5)
    assert newest(cluster, proposal).state == "expired"
    fresh = cluster.wait_for_proposal(0)
    assert fresh.approvals == ()
    cluster.check()


def test_a_first_approval_survives_a_restart_of_the_controller() -> None:
    cluster, proposal = waiting(policy=TWO)
    cluster.run_steps(2)
    assert cluster.decide(proposal, who="ada").ok
    restart_controller(cluster)
    assert newest(cluster, proposal).state == "open"
    cluster.decide(newest(cluster, proposal), who="ada")
    assert refused(cluster, "not_allowed")
    assert cluster.decide(newest(cluster, proposal), who="bob").ok
    cluster.run_steps(3)
    assert newest(cluster, proposal).state == "applied"


# roles -------------------------------------------------------------------------------------------


def _signed(cluster: SimCluster, proposal: Proposal, role: Role, **more: Any) -> CommandResult:
    run = cluster.coordinator.run
    command = Decide(
        id=f"{role}-{proposal.revision}",
        at=cluster.now,
        who="ada",
        via="browser",
        proposal=proposal.id,
        generation=proposal.generation,
        revision=proposal.revision,
        verdict=more.pop("verdict", "approved"),
        reason="as agreed",
    )
    return cluster.submit(sign(command, run, role, KEYS["app"]))


@pytest.mark.parametrize("verdict", ["approved", "rejected"])
def test_a_kind_can_take_an_admin(verdict: str) -> None:
    cluster, proposal = waiting(policy=PolicyConfig(deciders=Deciders(shrink="admin")))
    run = cluster.coordinator.run
    cluster.coordinator.desk.intake.require_identity(
        lambda command, now: refusal(command, run, KEYS, now)
    )
    assert proposal.decider == "admin"
    result = _signed(cluster, proposal, "approver", verdict=verdict)
    assert refused(cluster, "not_allowed")
    assert "role approver may not decide this; the policy asks for admin" in result.message
    assert _signed(cluster, newest(cluster, proposal), "admin", verdict=verdict).ok
    cluster.check()


# evidence ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("allowed_s", "waited_s"), [(60.0, 100.0), (25.0, 29.0)])
def test_nothing_is_approved_on_evidence_that_is_too_old(allowed_s: float, waited_s: float) -> None:
    cluster, proposal = waiting(policy=PolicyConfig(evidence_max_age_s=allowed_s))
    cluster.run(waited_s)
    result = cluster.decide(proposal)
    assert refused(cluster, "stale")
    words = f"the newest was seen {waited_s:g} s ago, allowed are {allowed_s:g} s"
    assert f"the evidence is too old: {words}" in result.message
    assert "The runtime has looked again: p2 proposes 'Shrink replica 0" in result.message
    old, fresh = newest(cluster, proposal), cluster.wait_for_proposal(0)
    assert (old.state, fresh.id) == ("stale", "p2")
    assert fresh.evidence[-1][1] == (
        "seen now: replica 0 stands by with 2 of 3 slots; no worker on slot 1"
    )
    assert fresh.evidence_at == fresh.created_at
    assert cluster.decide(fresh).ok
    cluster.check()


def test_what_was_asked_for_by_hand_is_looked_at_again_too() -> None:
    cluster = running(2, 2, 2, policy=PolicyConfig(evidence_max_age_s=60.0))
    assert cluster.trigger(1, "drop").ok
    asked = cluster.wait_for_proposal(1)
    assert asked.evidence[-1][1] == "seen now: replica 1 trains with 2 of 2 slots"
    cluster.run(70.0)
    result = cluster.decide(asked)
    assert "The runtime has looked again: p2 proposes 'Drop replica 1" in result.message
    fresh = cluster.wait_for_proposal(1)
    assert (fresh.kind, fresh.asked_by) == ("drop", "ada")
    assert cluster.decide(fresh).ok


def test_to_reject_no_evidence_is_too_old() -> None:
    cluster, proposal = waiting(policy=PolicyConfig(evidence_max_age_s=60.0))
    cluster.run(100.0)
    assert cluster.decide(proposal, "rejected").ok


# refusals ----------------------------------------------------------------------------------------


def test_stale_says_what_changed_since() -> None:
    cluster, proposal = waiting(3, 3, 3)
    cluster.kill("rack-1/1")
    cluster.run_steps(1)
    result = cluster.decide(proposal)
    assert refused(cluster, "stale")
    assert "is stale: generation 2 ended: rack-1/1 failed. Since it was proposed" in result.message
    assert "replica 1 stands by (it trained) and lost slot 1" in result.message
    assert f"{cluster.wait_for_proposal(0).id} stands in its place." in result.message


def test_expired_says_what_stands_in_its_place() -> None:
    cluster, proposal = waiting(policy=PolicyConfig(expires_s=5.0))
    cluster.run(5.5)
    result = cluster.decide(proposal)
    assert refused(cluster, "expired")
    assert "is expired: nobody answered within 5 s. Since it was proposed 6 s ago: no replica" in (
        result.message
    )
    assert "p2 stands in its place." in result.message


def test_decided_says_by_whom_when_and_how_far_it_is() -> None:
    cluster, proposal = waiting()
    assert cluster.decide(proposal, who="ada").ok
    cluster.run_steps(3)
    result = cluster.decide(proposal, who="bob")
    assert refused(cluster, "decided")
    assert "was approved by ada at 00:16:" in result.message
    assert "and is applied now" in result.message
    assert "replica 0 trains (it stood by)" in result.message


# undo --------------------------------------------------------------------------------------------


def test_a_drop_is_taken_back() -> None:
    cluster = running(2, 2, 2)
    cluster.trigger(1, "drop")
    dropped = cluster.wait_for_proposal(1)
    assert cluster.approve(dropped).ok
    cluster.run_steps(3)
    assert cluster.undo(dropped).ok
    inverse = cluster.wait_for_proposal(1)
    assert (inverse.kind, inverse.undoes, inverse.asked_by) == ("grow", dropped.id, "ada")
    assert inverse.cause == f"to take back {dropped.id}, asked for by ada"
    assert inverse.options[inverse.recommended].step_s > 0
    assert cluster.approve(inverse).ok
    cluster.run_steps(3)
    assert cluster.shape() == [(0, 1), (0, 1), (0, 1)]
    cluster.check()


def test_a_shrink_into_training_is_taken_back_by_standing_by() -> None:
    cluster, proposal = waiting()
    assert cluster.approve(proposal).ok
    cluster.run_steps(3)
    assert cluster.undo(proposal).ok
    inverse = cluster.wait_for_proposal(0)
    assert inverse.kind == "drop"
    assert cluster.approve(inverse).ok
    cluster.run_steps(3)
    assert cluster.shape() == [(), (0, 1, 2)]
    # Taken back is not proposed anew until the facts change.
    assert cluster.open_for(0) is None
    cluster.check()


def test_a_grow_is_taken_back_to_the_slots_of_before() -> None:
    cluster, proposal = waiting()
    assert cluster.approve(proposal).ok
    cluster.run_steps(3)
    cluster.fault("rack-0/1", "repair")
    grow = cluster.wait_for_proposal(0)
    assert cluster.approve(grow).ok
    cluster.run_steps(3)
    assert cluster.shape() == [(0, 1, 2), (0, 1, 2)]
    assert cluster.undo(grow).ok
    inverse = cluster.wait_for_proposal(0)
    assert inverse.kind in ("shrink", "shrink_boost")
    assert inverse.options[inverse.recommended].shape[0] == (0, 2)
    assert cluster.approve(inverse).ok
    cluster.run_steps(3)
    assert cluster.shape() == [(0, 2), (0, 1, 2)]
    assert cluster.open_for(0) is None
    cluster.check()


def test_what_cannot_be_taken_back_says_why() -> None:
    cluster, proposal = waiting()
    result = cluster.undo(proposal)
    assert refused(cluster, "invalid")
    assert "p1 is open: there is nothing to take back" in result.message
    assert cluster.approve(proposal).ok
    cluster.run_steps(3)
    cluster.kill("rack-0/2")
    cluster.run_steps(1)
    result = cluster.undo(proposal)
    assert refused(cluster, "invalid")
    assert "replica 0 has changed since p1 was applied" in result.message
    result = cluster.undo(msgspec.structs.replace(proposal, id="p77"))
    assert refused(cluster, "unknown")
