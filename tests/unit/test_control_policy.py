"""The policy in a run: its modes, at which hour it holds, and changes of it as decisions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from runtime.config import PolicyConfig
from runtime.plan.policy_config import Approvals, QuietHours
from storage.commands import CommandResult, SetPolicy
from storage.records import Proposal
from tests.support.control_cluster import SimCluster, refused, running, waiting
from tests.support.control_restart import restart_controller

_ids = itertools.count()


def set_policy(cluster: SimCluster, reason: str = "a test", **changes: Any) -> CommandResult:
    revision = changes.pop("revision", cluster.coordinator.desk.policy.revision)
    return cluster.submit(
        SetPolicy(
            id=f"s{next(_ids)}",
            at=cluster.now,
            who="ada",
            via="cli",
            role="admin",
            changes={key.replace("__", "."): str(value) for key, value in changes.items()},
            revision=revision,
            reason=reason,
        )
    )


def newest(cluster: SimCluster, proposal: Proposal) -> Proposal:
    return cluster.proposals[proposal.id]


def header(cluster: SimCluster) -> str:
    return cluster.coordinator.snapshot(cluster.now).policy


# modes -------------------------------------------------------------------------------------------


def test_observe_proposes_nothing_and_refuses_what_is_asked_for() -> None:
    cluster = running(2, 2, 2, policy=PolicyConfig(mode="observe"))
    cluster.kill("rack-0/1")
    cluster.run_steps(4)
    assert cluster.proposals == {}
    # The broken replica is left out whatever the policy says.
    assert cluster.shape() == [(), (0, 1), (0, 1)]
    result = cluster.trigger(0, "shrink")
    assert refused(cluster, "not_allowed")
    assert "the policy has nothing proposed of this kind" in result.message
    assert header(cluster) == "observe"
    assert set_policy(cluster, mode="act_with_approval").ok
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_steps(2)
    assert cluster.shape()[0] == (0,)
    cluster.check()


def test_recommend_proposes_what_nobody_can_carry_out() -> None:
    cluster, proposal = waiting(policy=PolicyConfig(mode="recommend", shrink="auto"))
    assert "the policy's mode is recommend" in proposal.barred
    result = cluster.decide(proposal)
    assert refused(cluster, "not_allowed")
    assert "p1 cannot be approved: the policy's mode is recommend" in result.message
    cluster.run_steps(3)
    assert newest(cluster, proposal).state == "open"
    assert cluster.decide(newest(cluster, proposal), "rejected").ok
    cluster.check()


def test_act_carries_out_what_gives_nothing_up() -> None:
    cluster = running(3, 3, policy=PolicyConfig(mode="act"))
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    assert cluster.shape() == [(0, 2), (0, 1, 2)]
    assert [one.who for one in cluster.decisions] == ["policy"]
    assert "policy: shrink" in cluster.decisions[0].reason
    cluster.check()


def test_what_a_person_asks_for_still_needs_an_approver() -> None:
    cluster = running(2, 2, 2, policy=PolicyConfig(mode="act", drop="auto"))
    assert cluster.trigger(1, "drop").ok
    asked = cluster.wait_for_proposal(1)
    cluster.run_steps(3)
    assert newest(cluster, asked).state == "open"
    cluster.check()


# hours -------------------------------------------------------------------------------------------


def test_quiet_hours_begin_while_a_proposal_waits() -> None:
    # Simulated time begins at 1,000 s of the epoch: 00:16:40 UTC.
    night = QuietHours(begin="00:18", end="00:30")
    cluster, proposal = waiting(policy=PolicyConfig(quiet_hours=(night,)))
    assert proposal.auto_at is None
    assert header(cluster) == "act with approval"
    cluster.run_until(lambda: cluster.now > 1_079.0, seconds=120.0)
    assert newest(cluster, proposal).state == "open"
    cluster.run_until(lambda: newest(cluster, proposal).state == "applied", seconds=10.0)
    assert "quiet hours 00:18 to 00:30 UTC, until 00:30 UTC" in cluster.decisions[0].reason
    assert "quiet hours" in header(cluster)
    cluster.check()


def test_quiet_hours_that_end_leave_the_rest_to_people() -> None:
    night = QuietHours(begin="00:00", end="00:17", mode="recommend")
    cluster, proposal = waiting(policy=PolicyConfig(quiet_hours=(night,)))
    cluster.decide(proposal)
    assert refused(cluster, "not_allowed")
    cluster.run_until(lambda: cluster.now > 1_021.0)
    assert newest(cluster, proposal).barred == ""
    assert cluster.decide(newest(cluster, proposal)).ok
    cluster.check()


# changes -----------------------------------------------------------------------------------------


def test_a_change_is_recorded_with_who_when_why_before_and_after() -> None:
    cluster = running()
    result = set_policy(cluster, "nobody is here at night", shrink="auto", approvals__drop=2)
    assert result.ok
    assert result.message == "the policy is act with approval; shrink: automatic"
    (event,) = cluster.events("policy_changed")
    assert event.message == (
        "ada changed the policy: shrink by_mode to auto; approvals.drop 1 to 2 "
        "(nobody is here at night)"
    )
    assert event.details["who"] == "ada"
    assert event.details["role"] == "admin"
    assert event.details["before"] == {"shrink": "by_mode", "approvals.drop": 1}
    assert event.details["after"] == {"shrink": "auto", "approvals.drop": 2}
    state = cluster.coordinator.snapshot(cluster.now).policy_state
    assert state is not None
    (change,) = state.changes
    assert (state.revision, change.who, change.at) == (1, "ada", event.at)
    assert change.words == "shrink by_mode to auto; approvals.drop 1 to 2"
    assert state.values["approvals"]["drop"] == 2
    assert header(cluster) == "act with approval; shrink: automatic"


def test_a_change_takes_hold_of_what_waits() -> None:
    cluster, proposal = waiting()
    assert set_policy(cluster, shrink="auto_after_deadline", deadline_s=20).ok
    cluster.run(0.2)
    assert newest(cluster, proposal).auto_at == pytest.approx(cluster.now + 20.0, abs=0.3)
    assert set_policy(cluster, mode="observe").ok
    cluster.run(0.2)
    assert newest(cluster, proposal).state == "stale"
    assert newest(cluster, proposal).state_reason == "the policy has nothing proposed any more"
    assert cluster.open_for(0) is None
    assert set_policy(cluster, mode="act", shrink="by_mode").ok
    cluster.run_steps(4)
    assert cluster.shape() == [(0, 2), (0, 1, 2)]
    cluster.check()


def test_approvals_given_under_another_rule_are_void() -> None:
    cluster, proposal = waiting(policy=PolicyConfig(approvals=Approvals(shrink=2)))
    assert cluster.decide(proposal, who="ada").ok
    assert set_policy(cluster, approvals__shrink=3).ok
    cluster.run(0.2)
    assert newest(cluster, proposal).approvals == ()
    assert newest(cluster, proposal).approvals_needed == 3
    cluster.check()


def test_a_change_survives_a_restart_of_the_controller() -> None:
    cluster, proposal = waiting()
    cluster.run_steps(2)
    assert set_policy(cluster, mode="recommend").ok
    cluster.run(0.2)
    restart_controller(cluster)
    assert header(cluster) == "recommend"
    cluster.run(0.2)
    cluster.decide(newest(cluster, proposal))
    assert refused(cluster, "not_allowed")
    state = cluster.coordinator.snapshot(cluster.now).policy_state
    assert state is not None
    (change,) = state.changes
    assert (change.revision, change.who, change.reason) == (1, "ada", "a test")


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"reason": " ", "mode": "act"}, "invalid", "changing the policy needs a reason"),
        ({"mode": "acts"}, "invalid", "`mode` is 'acts'; allowed: 'act' or"),
        ({"revision": 3, "mode": "act"}, "stale", "changed meanwhile"),
    ],
)
def test_changes_that_are_refused(changes: dict[str, Any], code: str, words: str) -> None:
    cluster = running()
    result = set_policy(cluster, **changes)
    assert refused(cluster, code)
    assert words in result.message
    assert cluster.events("policy_changed") == []


def test_of_two_who_change_it_at_once_the_second_is_told() -> None:
    cluster = running()
    assert set_policy(cluster, "first", mode="act", revision=0).ok
    result = set_policy(cluster, "second", mode="observe", revision=0)
    assert refused(cluster, "stale")
    assert "changed meanwhile by ada: mode act_with_approval to act" in result.message
    assert header(cluster).startswith("act;")


def test_a_change_that_changes_nothing_is_no_decision() -> None:
    cluster = running()
    assert set_policy(cluster, mode="act_with_approval").message.startswith("nothing changed")
    assert cluster.events("policy_changed") == []
