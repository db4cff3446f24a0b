"""Proposals and decisions: what opens one, what ends it, and what may be answered when."""

from __future__ import annotations

import msgspec
import pytest

from runtime.config import PolicyConfig
from runtime.control import messages as m
from tests.support.control_cluster import SimCluster, refused, sim_config, waiting

# a proposal's life -------------------------------------------------------------------------------


def test_a_proposal_shows_every_option_and_what_it_is_about() -> None:
    cluster, proposal = waiting()
    kinds = [option.kind for option in proposal.options]
    assert kinds == ["carry_on", "shrink", "shrink_boost", "drop", "replace", "restart"]
    assert proposal.options[proposal.recommended].feasible
    assert proposal.generation == cluster.coordinator.number == 2
    assert proposal.before[0].mode == "standby"
    assert proposal.evidence[-1][1] == "rack-0/1 failed: its worker ended by signal 9"
    assert proposal.expires_at == proposal.created_at + 900.0
    assert proposal.auto_at is None


def test_approved_applying_applied_with_what_it_brought() -> None:
    cluster, proposal = waiting()
    cluster.run_steps(2)
    assert cluster.approve(proposal).ok
    assert cluster.proposals[proposal.id].state == "applying"
    cluster.run_steps(14)
    done = cluster.proposals[proposal.id]
    assert (done.state, done.decided_by, done.chosen) == ("applied", "ada", proposal.recommended)
    assert done.outcome is not None
    assert done.outcome.num_steps == 10
    predicted = proposal.options[proposal.recommended]
    assert done.outcome.step_s == pytest.approx(predicted.step_s, rel=0.05)
    assert done.outcome.goodput == pytest.approx(predicted.goodput, rel=0.05)
    assert cluster.shape() == [(0, 2), (0, 1, 2)]
    # Right after a commit the step at hand has longer to go than a whole step of the new shape.
    assert [o.abort for o in cluster.ordered(m.LeaveGeneration)] == [True, True]
    cluster.check()


def test_a_step_that_is_nearly_done_is_finished_before_the_change() -> None:
    cluster, proposal = waiting()
    cluster.run_steps(2)
    step_s = cluster.coordinator.progress.expected_step_s
    cluster.run(0.75 * step_s)
    assert cluster.approve(proposal).ok
    cluster.run_steps(4)
    assert cluster.proposals[proposal.id].state == "applied"
    assert [o.abort for o in cluster.ordered(m.LeaveGeneration)] == [True, False]
    cluster.check()


@pytest.mark.parametrize("verdict", ["rejected", "approved"])
def test_a_rejection_and_an_override_need_a_reason(verdict: str) -> None:
    cluster, proposal = waiting()
    other = next(
        i for i, o in enumerate(proposal.options) if o.feasible and i != proposal.recommended
    )
    option = other if verdict == "approved" else None
    result = cluster.decide(proposal, verdict, option=option, reason=" ")
    assert (result.ok, result.code) == (False, "invalid")
    assert "needs a reason" in result.message
    standing = cluster.proposals[proposal.id]
    assert standing.state == "open"
    assert cluster.decide(standing, verdict, option=option, reason="spare parts are here").ok


def test_rejected_and_not_asked_again() -> None:
    cluster, proposal = waiting()
    assert cluster.decide(proposal, "rejected", reason="repair is under way").ok
    cluster.run_steps(5)
    after = cluster.proposals[proposal.id]
    assert (after.state, after.state_reason) == ("rejected", "repair is under way")
    assert cluster.open_for(0) is None
    assert cluster.shape() == [(), (0, 1, 2)]
    cluster.check()


def test_asked_again_once_the_facts_have_changed_even_if_they_change_back() -> None:
    cluster, proposal = waiting()
    assert cluster.decide(proposal, "rejected").ok
    cluster.fault("rack-0/1", "repair")
    grow = cluster.wait_for_proposal(0)
    assert cluster.approve(grow).ok
    cluster.run_steps(3)
    cluster.kill("rack-0/1")
    again = cluster.wait_for_proposal(0)
    assert again.before[0].live == proposal.before[0].live
    cluster.check()


@pytest.mark.parametrize("kind", ["carry_on", "drop"])
def test_carrying_on_without_it_is_an_answer_too(kind: str) -> None:
    cluster, proposal = waiting()
    assert cluster.approve(proposal, kind).ok
    cluster.run_steps(5)
    assert cluster.proposals[proposal.id].state == "applied"
    assert cluster.open_for(0) is None
    assert cluster.coordinator.number == 2
    cluster.fault("rack-0/1", "repair")
    assert cluster.wait_for_proposal(0).kind == "grow"
    cluster.check()


def test_a_dropped_replica_stays_dropped_until_its_facts_change() -> None:
    cluster = SimCluster(sim_config(2, 2, 2))
    cluster.run_steps(3)
    assert cluster.trigger(1, "drop").ok
    assert cluster.approve(cluster.wait_for_proposal(1)).ok
    cluster.run_steps(5)
    assert cluster.shape() == [(0, 1), (), (0, 1)]
    assert cluster.open_for(1) is None
    cluster.kill("rack-1/0")
    cluster.wait_for_proposal(1)
    cluster.check()


def test_expires_and_a_fresh_one_opens() -> None:
    cluster, proposal = waiting(policy=PolicyConfig(expires_s=5.0))
    cluster.run(5.5)
    assert cluster.proposals[proposal.id].state == "expired"
    fresh = cluster.open_for(0)
    assert fresh is not None
    assert fresh.id != proposal.id
    cluster.decide(proposal)
    assert refused(cluster, "expired")
    assert cluster.approve(fresh).ok
    cluster.check()


def test_a_regrown_replica_is_whole_at_its_normal_caps() -> None:
    cluster = SimCluster(sim_config(8, 8))
    cluster.run_steps(4)
    cluster.kill("rack-0/1")
    proposal = cluster.wait_for_proposal(0)
    cluster.approve(proposal)
    cluster.run_steps(4)
    cluster.fault("rack-0/1", "repair")
    cluster.run_steps(1)
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_steps(4)
    assert cluster.shape() == [tuple(range(8)), tuple(range(8))]
    assert set(cluster.ranks.caps_w.values()) == {1000.0}
    plan = cluster.coordinator.plan
    assert plan is not None
    assert [r.num_samples for r in plan.replicas] == [6, 6]
    cluster.check()


# while it waits ----------------------------------------------------------------------------------


def test_another_slot_of_the_replica_dies_while_it_waits() -> None:
    cluster, proposal = waiting()
    cluster.kill("rack-0/0")
    cluster.run_steps(1)
    assert cluster.proposals[proposal.id].state == "stale"
    cluster.decide(proposal)
    assert refused(cluster, "stale")
    fresh = cluster.wait_for_proposal(0)
    assert fresh.options[1].shape[0] == (2,)
    assert cluster.approve(fresh).ok
    cluster.run_steps(2)
    assert cluster.shape() == [(2,), (0, 1, 2)]
    cluster.check()


def test_a_slot_of_another_replica_dies_while_it_waits() -> None:
    cluster, proposal = waiting(3, 3, 3)
    cluster.kill("rack-1/1")
    cluster.run_steps(1)
    assert cluster.proposals[proposal.id].state == "stale"
    fresh = cluster.wait_for_proposal(0)
    assert fresh.generation == cluster.coordinator.number
    assert cluster.wait_for_proposal(1).replica == 1
    assert cluster.approve(fresh).ok
    cluster.run_steps(2)
    other = cluster.wait_for_proposal(1)
    assert other.generation == cluster.coordinator.number
    cluster.check()


def test_cannot_be_approved_between_the_failure_and_the_next_generation() -> None:
    """The window in which the old generation is over and the next not yet there."""
    cluster, proposal = waiting(3, 3, 3)
    cluster.workers["rack-2/0"].stuck = True
    cluster.kill("rack-1/1")
    cluster.run_until(lambda: cluster.coordinator.phase == "leaving")
    assert cluster.proposals[proposal.id].state == "stale"
    cluster.decide(proposal)
    assert refused(cluster, "stale")
    cluster.trigger(0, "drop")
    assert refused(cluster, "invalid")
    cluster.run_steps(2)
    cluster.check()


def test_a_failure_while_it_is_applied() -> None:
    cluster, proposal = waiting(3, 3, 3)
    cluster.run_steps(1)
    assert cluster.approve(proposal).ok
    assert cluster.coordinator.phase == "leaving"
    cluster.kill("rack-1/1")
    cluster.run_steps(2)
    after = cluster.proposals[proposal.id]
    assert after.state == "failed"
    assert after.state_reason == "interrupted: rack-1/1 failed"
    assert cluster.shape() == [(), (), (0, 1, 2)]
    assert cluster.open_for(0) is not None
    assert cluster.open_for(1) is not None
    cluster.check()


def test_a_failure_while_its_generation_is_entered() -> None:
    cluster, proposal = waiting(3, 3, 3)
    cluster.run_steps(1)
    assert cluster.approve(proposal).ok
    cluster.run_until(lambda: cluster.coordinator.phase == "entering")
    cluster.kill("rack-1/1")
    cluster.run_steps(2)
    # Its replica was not hit: the generation after the failure has it in the shape approved.
    assert cluster.proposals[proposal.id].state == "applied"
    assert cluster.shape() == [(0, 2), (), (0, 1, 2)]
    cluster.check()


def test_a_failure_of_its_own_replica_while_its_generation_is_entered() -> None:
    cluster, proposal = waiting(3, 3, 3)
    cluster.run_steps(1)
    assert cluster.approve(proposal).ok
    cluster.run_until(lambda: cluster.coordinator.phase == "entering")
    cluster.kill("rack-0/0")
    cluster.run_steps(2)
    after = cluster.proposals[proposal.id]
    assert (after.state, after.state_reason) == ("failed", "interrupted: rack-0/0 failed")
    assert cluster.shape() == [(), (0, 1, 2), (0, 1, 2)]
    cluster.check()


def test_it_was_applied_if_its_first_step_was_committed_though_nobody_told() -> None:
    """Rank 0 dies right after the first commit of the new shape, before it could tell."""
    cluster, proposal = waiting(3, 3, 3)
    cluster.run_steps(1)
    assert cluster.approve(proposal).ok
    cluster.run_until(lambda: cluster.coordinator.phase == "training")
    cluster.commit_on(*cluster.coordinator.plan.members())  # type: ignore[union-attr]
    cluster.kill("rack-0/0")
    cluster.run_steps(3)
    after = cluster.proposals[proposal.id]
    assert after.state == "applied"
    formed = next(f for f in cluster.formed if f.proposal == proposal.id)
    assert "approved by ada" in formed.cause
    cluster.check()


def test_the_gpu_that_was_to_come_back_dies_while_it_is_applied() -> None:
    cluster, proposal = waiting()
    cluster.approve(proposal)
    cluster.run_steps(2)
    cluster.fault("rack-0/1", "repair")
    grow = cluster.wait_for_proposal(0)
    assert cluster.approve(grow).ok
    cluster.kill("rack-0/1")
    cluster.run_steps(2)
    after = cluster.proposals[grow.id]
    assert after.state == "failed"
    assert cluster.shape() == [(0, 2), (0, 1, 2)]
    assert not any(f.proposal == grow.id for f in cluster.formed)
    cluster.check()


def test_a_gpu_that_comes_back_while_another_change_is_applied_is_not_forgotten() -> None:
    cluster, proposal = waiting()
    cluster.run_steps(2)
    cluster.slow_start |= {"rack-0/1"}
    cluster.fault("rack-0/1", "repair")
    assert cluster.approve(proposal).ok
    assert cluster.coordinator.phase == "leaving"
    cluster.come_up("rack-0/1")
    cluster.run_until(lambda: cluster.proposals[proposal.id].state == "applied")
    assert cluster.wait_for_proposal(0, seconds=1.0).kind == "grow"
    cluster.check()


def test_the_gpu_that_was_to_come_back_dies_while_it_waits() -> None:
    cluster, proposal = waiting()
    cluster.approve(proposal)
    cluster.run_steps(2)
    cluster.fault("rack-0/1", "repair")
    grow = cluster.wait_for_proposal(0)
    cluster.kill("rack-0/1")
    cluster.run(0.2)
    assert cluster.proposals[grow.id].state == "stale"
    cluster.decide(grow)
    assert refused(cluster, "stale")
    cluster.check()


def test_only_one_of_two_proposals_is_carried_out_at_a_time() -> None:
    cluster, _ = waiting(3, 3, 3)
    cluster.kill("rack-1/1")
    cluster.run_steps(2)
    first, second = cluster.wait_for_proposal(0), cluster.wait_for_proposal(1)
    assert cluster.approve(first).ok
    cluster.approve(second)
    assert refused(cluster, "stale")
    cluster.run_steps(2)
    assert cluster.proposals[first.id].state == "applied"
    assert cluster.shape() == [(0, 2), (), (0, 1, 2)]
    assert cluster.approve(cluster.wait_for_proposal(1)).ok
    cluster.run_steps(2)
    assert cluster.shape() == [(0, 2), (0, 2), (0, 1, 2)]
    cluster.check()


# answers -----------------------------------------------------------------------------------------


def test_the_second_answer_is_refused_and_the_same_click_answered_alike() -> None:
    cluster, proposal = waiting()
    first = cluster.decide(proposal, id="click-1", who="ada")
    assert (first.ok, first.code) == (True, "done")
    again = cluster.decide(proposal, id="click-1", who="ada")
    assert (again.ok, again.code) == (True, "duplicate")
    assert again.message == first.message
    cluster.decide(proposal, id="click-2", who="bob")
    assert refused(cluster, "decided", "click-2")
    cluster.run_steps(2)
    assert len(cluster.decisions) == 1
    cluster.check()


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        ({"option": 99}, "invalid", "option 99 does not exist"),
        ({"option": -1}, "invalid", "option -1 does not exist"),
        ({"option": 4}, "invalid", "no spare configured"),
        ({"generation": 1}, "stale", "the run is in generation 2"),
    ],
)
def test_refusals_say_why(more: dict[str, int], code: str, words: str) -> None:
    cluster, proposal = waiting()
    result = cluster.decide(proposal, **more)
    assert refused(cluster, code)
    assert words in result.message
    # The live store had taken it for good: the newest form says that it is open.
    newest = cluster.proposals[proposal.id]
    assert newest.state == "open"
    assert newest.revision > proposal.revision + 1
    assert cluster.decide(newest).ok
    cluster.check()


def test_an_unknown_proposal() -> None:
    cluster, proposal = waiting()
    result = cluster.decide(msgspec.structs.replace(proposal, id="p77"))
    assert refused(cluster, "unknown")
    assert "p77" in result.message


def test_commands_after_the_end() -> None:
    cluster, proposal = waiting()
    cluster.coordinator.finish("stopped", "enough", cluster.now)
    cluster._carry_out(cluster.coordinator.outgoing.take())
    cluster.run_until(lambda: cluster.finish is not None)
    assert cluster.proposals[proposal.id].state == "stale"
    result = cluster.decide(proposal)
    assert refused(cluster, "invalid")
    assert "the run is over" in result.message


# policy ------------------------------------------------------------------------------------------


def test_policy_auto_acts_at_once_and_signs() -> None:
    cluster = SimCluster(sim_config(3, 3, policy=PolicyConfig(shrink="auto", grow="auto")))
    cluster.run_steps(4)
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    # Decided while the generation ended: it never stood by, and one change was enough.
    assert cluster.coordinator.number == 2
    assert cluster.shape() == [(0, 2), (0, 1, 2)]
    (decision,) = cluster.decisions
    assert (decision.who, decision.via, decision.generation) == ("policy", "policy", 1)
    proposal = cluster.proposals[decision.proposal]
    assert proposal.state == "applied"
    assert proposal.kind in ("shrink", "shrink_boost")
    assert [g.proposal for g in cluster.formed] == ["", proposal.id]
    cluster.fault("rack-0/1", "repair")
    cluster.run_steps(4)
    assert cluster.shape() == [(0, 1, 2), (0, 1, 2)]
    cluster.check()


def test_policy_auto_with_two_broken_replicas_carries_out_one_after_the_other() -> None:
    cluster = SimCluster(sim_config(3, 3, 3, policy=PolicyConfig(shrink="auto")))
    cluster.run_steps(3)
    cluster.kill("rack-0/1", "rack-1/1")
    cluster.run_steps(6)
    assert cluster.shape() == [(0, 2), (0, 2), (0, 1, 2)]
    cluster.check()


def test_policy_acts_at_the_deadline_unless_answered_before() -> None:
    policy = PolicyConfig(shrink="auto_after_deadline", deadline_s=10.0)
    cluster, proposal = waiting(policy=policy)
    assert proposal.auto_at == proposal.created_at + 10.0
    cluster.run(9.0)
    assert cluster.open_for(0) is not None
    cluster.run(4.0)
    assert cluster.proposals[proposal.id].state == "applied"
    cluster.check()
    cluster, proposal = waiting(policy=policy)
    assert cluster.decide(proposal, "rejected").ok
    cluster.run(20.0)
    assert cluster.shape() == [(), (0, 1, 2)]
    cluster.check()
