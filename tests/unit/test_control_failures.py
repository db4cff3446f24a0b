"""What the coordinator does when workers die and agents go away, over simulated workers."""

from __future__ import annotations

import pytest

from runtime.control import messages as m
from storage.records import RunEnded
from tests.support.control_cluster import running

# failing -----------------------------------------------------------------------------------------


def test_a_failure_leaves_the_replica_out_and_the_others_carry_the_batch() -> None:
    cluster = running(3, 3, 3)
    cluster.kill("rack-1/2")
    cluster.run_steps(1)
    assert cluster.shape() == [(0, 1, 2), (), (0, 1, 2)]
    plan = cluster.coordinator.plan
    assert plan is not None
    assert [r.mode for r in plan.replicas] == ["training", "standby", "training"]
    assert [r.num_samples for r in plan.replicas] == [6, 0, 6]
    assert len(cluster.events("gpu_failed")) == 1
    assert len(cluster.events("generation_aborted")) == 1
    assert cluster.ordered(m.LeaveGeneration) == [m.LeaveGeneration(generation=1, abort=True)]
    cluster.check()


def test_drops_a_step_that_nobody_applied() -> None:
    cluster = running()
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    plan = cluster.coordinator.plan
    assert plan is not None
    assert plan.applied_step == 3
    assert plan.roll_forward is None
    cluster.check()


@pytest.mark.parametrize("applied", ["rack-0/0", "rack-0/2", "rack-1/1"])
def test_rolls_forward_when_one_rank_applied(applied: str) -> None:
    cluster = running()
    cluster.commit_on(applied)
    cluster.kill("rack-1/2")
    cluster.run_steps(2)
    plan = cluster.coordinator.plan
    assert plan is not None
    assert plan.applied_step == 4
    assert plan.roll_forward is not None
    assert plan.roll_forward.step == 3
    assert plan.roll_forward.grad_norm == cluster.steps[3].grad_norm
    # Whoever applied it told it again when it parked: rank 0 may not have.
    assert cluster.steps[3].generation == 1
    cluster.check()


def test_rank_0_dies_after_the_commit_before_it_could_tell() -> None:
    cluster = running()
    cluster.commit_on("rack-0/0", "rack-1/0")
    cluster.kill("rack-0/0")
    cluster.run_steps(1)
    assert cluster.steps[3].generation == 1
    cluster.check()


def test_rank_0_told_the_commit_and_nobody_else_applied_it() -> None:
    """All others hold the synchronised gradients: the told step is rolled forward, not lost."""
    cluster = running()
    cluster.commit_on("rack-0/0", told=True)
    cluster.kill("rack-0/0")
    cluster.run_steps(2)
    assert cluster.finish is None
    plan = cluster.coordinator.plan
    assert plan is not None
    assert plan.roll_forward is not None
    assert plan.roll_forward.grad_norm == cluster.steps[3].grad_norm
    cluster.check()


def test_the_step_is_dropped_when_only_the_dead_applied_it_untold() -> None:
    cluster = running()
    cluster.commit_on("rack-0/0")
    cluster.kill("rack-0/0")
    cluster.run_steps(1)
    plan = cluster.coordinator.plan
    assert plan is not None
    assert plan.applied_step == 3
    assert plan.roll_forward is None
    cluster.check()


def test_a_failure_while_others_enter() -> None:
    cluster = running(3, 3, 3)
    cluster.kill("rack-0/1")
    cluster.run_until(lambda: cluster.coordinator.phase == "entering")
    cluster.kill("rack-2/0")
    cluster.run_steps(2)
    assert cluster.shape() == [(), (0, 1, 2), ()]
    assert cluster.coordinator.number == 3
    assert [f.generation for f in cluster.formed] == [1, 3]
    cluster.check()


def test_a_failure_while_a_rolled_forward_generation_is_entered() -> None:
    """Some have rolled forward, some not yet: the next vote brings them together."""
    cluster = running(3, 3, 3)
    cluster.commit_on("rack-1/0")
    cluster.kill("rack-0/1")
    cluster.run_until(lambda: cluster.coordinator.phase == "entering")
    # Within entering: one has settled the pending step, the others have not.
    worker = cluster.workers["rack-2/2"]
    worker.applied, worker.norm, worker.synced = 4, cluster.steps[3].grad_norm, False
    cluster.kill("rack-1/0")
    cluster.run_steps(2)
    assert [s.step for s in cluster.steps] == [0, 1, 2, 3, 4, 5]
    cluster.check()


def test_two_at_once_in_different_replicas() -> None:
    cluster = running(3, 3, 3)
    cluster.kill("rack-0/1", "rack-1/1")
    cluster.run_steps(2)
    assert cluster.shape() == [(), (), (0, 1, 2)]
    assert cluster.coordinator.number == 2
    assert len(cluster.events("generation_aborted")) == 1
    assert {p.replica for p in cluster.proposals.values() if p.state == "open"} == {0, 1}
    cluster.check()


def test_no_whole_replica_is_left() -> None:
    """The run never waits for a person: everybody shrinks at once, and it says so."""
    cluster = running()
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    first = cluster.wait_for_proposal(0)
    cluster.kill("rack-1/0")
    cluster.run_steps(2)
    assert cluster.shape() == [(0, 2), (1, 2)]
    assert cluster.proposals[first.id].state == "stale"
    assert len(cluster.events("replica_reshaped_by_policy")) == 1
    assert cluster.open_for(0) is None
    assert not cluster.decisions
    cluster.check()


def test_all_slots_of_a_replica_die() -> None:
    cluster = running()
    cluster.kill("rack-0/0", "rack-0/1", "rack-0/2")
    cluster.run_steps(3)
    plan = cluster.coordinator.plan
    assert plan is not None
    assert [r.mode for r in plan.replicas] == ["out", "training"]
    assert cluster.open_for(0) is None
    # One comes back: it may rejoin alone.
    cluster.fault("rack-0/1", "repair")
    proposal = cluster.wait_for_proposal(0)
    assert cluster.approve(proposal).ok
    cluster.run_steps(3)
    assert cluster.shape() == [(1,), (0, 1, 2)]
    cluster.check()


def test_all_replicas_die() -> None:
    cluster = running()
    cluster.kill(*sorted(cluster.workers))
    cluster.run(5.0)
    assert cluster.finish is not None
    assert cluster.finish.status == "failed"
    assert "no replica has a live slot" in cluster.finish.reason
    snapshot = cluster.coordinator.snapshot(cluster.now)
    assert snapshot.status == "failed"
    assert snapshot.ended_at is not None
    assert isinstance(cluster.entries[-1], RunEnded)
    assert cluster.ordered(m.Quit) == [m.Quit()]
    count = len(cluster.entries)
    assert cluster.coordinator.tick(cluster.now + 5) == []
    late = m.WorkerReady(gpu="rack-0/0", pid=99)
    assert cluster.coordinator.handle(late, cluster.now + 6) == []
    assert len(cluster.entries) == count
    cluster.check()


def test_all_die_while_one_that_came_back_waits() -> None:
    """It has no state: the run ends rather than start over."""
    cluster = running()
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    cluster.fault("rack-0/1", "repair")
    cluster.run_steps(1)
    cluster.kill(*sorted(set(cluster.workers) - {"rack-0/1"}))
    cluster.run(5.0)
    assert cluster.finish is not None
    assert cluster.finish.status == "failed"
    cluster.check()


def test_the_holders_of_a_unit_are_gone() -> None:
    """Replica 0 has holes and replica 1 dies as a whole: part of the state is nowhere."""
    cluster = running()
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    cluster.kill("rack-1/0", "rack-1/1", "rack-1/2")
    cluster.run(5.0)
    assert cluster.finish is not None
    assert cluster.finish.status == "failed"
    assert "state lost" in cluster.finish.reason
    cluster.check()


# agents ------------------------------------------------------------------------------------------


def test_a_lost_host_is_left_out_and_may_return() -> None:
    cluster = running(2, 2, hosts=("a", "b"))
    cluster.disconnect("a")
    cluster._carry_out(cluster.coordinator.host_lost("a", cluster.now))
    cluster.run_steps(2)
    assert cluster.shape() == [(), (0, 1)]
    cluster.reconnect("a")
    for gpu in ("rack-0/0", "rack-0/1"):
        ready = m.WorkerReady(gpu=gpu, pid=cluster.workers[gpu].pid)
        cluster._to_controller("a", ready)
    cluster.run(0.1)
    proposal = cluster.wait_for_proposal(0)
    assert proposal.kind == "grow"
    assert cluster.approve(proposal).ok
    cluster.run_steps(3)
    assert cluster.shape() == [(0, 1), (0, 1)]
    cluster.check()


def test_workers_given_up_while_their_agent_was_away_end_when_it_is_back() -> None:
    cluster = running(2, 2, hosts=("a", "b"))
    given_up = [cluster.workers[gpu].pid for gpu in ("rack-0/0", "rack-0/1")]
    cluster.stop("rack-0/0")
    cluster.disconnect("a")
    cluster.run_until(lambda: cluster.shape() == [(), (0, 1)])
    cluster.reconnect("a")
    cluster.run(0.1)
    assert cluster.workers.keys() == {"rack-1/0", "rack-1/1"}
    for gpu in ("rack-0/0", "rack-0/1"):
        assert cluster.fault(gpu, "repair").ok
    cluster.run(1.0)
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_until(lambda: cluster.shape() == [(0, 1), (0, 1)])
    # A late order to end the old ones means nobody any more.
    for pid in given_up:
        cluster.ranks.obey(m.KillWorker(gpu="rack-0/0", pid=pid), "a")
    cluster.run_steps(3)
    assert cluster.shape() == [(0, 1), (0, 1)]
    cluster.check()


def test_a_repair_asked_for_while_the_agent_was_away_is_made_up_for() -> None:
    cluster = running(2, 2, hosts=("a", "b"))
    cluster.gone_for_good = True  # The workers of a, with what they alone were to tell.
    cluster.disconnect("a")
    cluster.run_until(lambda: cluster.shape() == [(), (0, 1)])
    for gpu in ("rack-0/0", "rack-0/1"):
        assert cluster.fault(gpu, "repair").ok  # The orders are lost.
    cluster.run(1.0)
    cluster.reconnect("a")
    cluster.run(1.0)
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_until(lambda: cluster.shape() == [(0, 1), (0, 1)])
    cluster.check()


def test_steps_committed_while_the_agent_was_away_are_told_again_once() -> None:
    cluster = running()
    cluster.disconnect("localhost")
    cluster.run(2.0)
    told = cluster.committed
    assert told == 3
    kept = list(cluster._kept["localhost"])
    cluster.reconnect("localhost")
    cluster._kept["localhost"] = kept
    cluster.reconnect("localhost")
    cluster.run(0.1)
    assert cluster.committed > 5
    cluster.run_steps(1)
    cluster.check()


def test_a_failure_elsewhere_while_the_agent_of_rank_0_is_away_loses_no_step() -> None:
    """Those who park know only the newest step; the agent that is away knows all of them."""
    cluster = running(2, 2, 2, hosts=("a", "b", "b"))
    cluster.disconnect("a")
    cluster.run(2.0)
    cluster.kill("rack-1/0")
    cluster.run(0.2)
    assert cluster.committed == 3
    cluster.reconnect("a")
    cluster.run_steps(5)
    assert not cluster.events("steps_untold")
    cluster.check()


def test_steps_that_a_lost_host_took_with_it_are_told_to_be_missing() -> None:
    cluster = running(2, 2, hosts=("a", "b"))
    cluster.disconnect("a")
    cluster.run(2.0)
    cluster._carry_out(cluster.coordinator.host_lost("a", cluster.now))
    cluster.gone_for_good = True
    cluster.run_steps(1)
    (event,) = cluster.events("steps_untold")
    assert event.message == "steps 3 to 4 were never told"
    assert cluster.steps[3].step == 5
    cluster.check()


def test_a_step_that_was_voted_out_is_not_told_into_the_journal_later() -> None:
    """Rank 0 alone came out of the commit, its host is given up, and comes back with that word."""
    cluster = running(2, 2, hosts=("a", "b"))
    cluster.disconnect("a")
    cluster.commit_on("rack-0/0", told=True)
    cluster._carry_out(cluster.coordinator.host_lost("a", cluster.now))
    cluster.run_until(lambda: cluster.coordinator.phase == "entering")
    cluster.reconnect("a")
    cluster.run_steps(2)
    assert [(s.step, s.generation) for s in cluster.steps[3:]] == [(3, 2), (4, 2)]
    assert [f.generation for f in cluster.formed] == [1, 2]
    cluster.check()


def test_a_lost_agent_that_says_hello_after_the_end_is_told_to_quit() -> None:
    cluster = running()
    cluster.coordinator.end_now("enough", cluster.now)
    cluster._carry_out(cluster.coordinator.outgoing.take())
    orders = cluster.coordinator.handle(cluster._hello("localhost"), cluster.now)
    assert [order.message for order in orders] == [m.Quit()]  # type: ignore[union-attr]


def test_an_order_that_was_lost_with_the_connection_is_given_again() -> None:
    cluster = running()
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    proposal = cluster.wait_for_proposal(0)
    cluster.disconnect("localhost")
    assert cluster.approve(proposal).ok
    cluster.run(0.5)
    cluster.reconnect("localhost")
    cluster.run_until(lambda: cluster.proposals[proposal.id].state == "applied")
    cluster.check()


def test_a_plan_that_was_lost_with_the_connection_is_given_again() -> None:
    cluster = running(2, 2, hosts=("a", "b"))
    cluster.kill("rack-0/1")
    cluster.run_until(lambda: cluster.coordinator.phase == "entering")
    cluster.disconnect("b")
    cluster.run(0.5)
    assert cluster.coordinator.phase == "entering"
    cluster.reconnect("b")
    cluster.run_steps(2, seconds=8.0)
    cluster.check()


def test_an_old_end_of_a_worker_says_nothing_about_the_new_one() -> None:
    cluster = running()
    old = cluster.workers["rack-0/1"].pid
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    cluster.slow_start |= {"rack-0/1"}
    cluster.fault("rack-0/1", "repair")
    again = m.WorkerExited(gpu="rack-0/1", pid=old, code=-9, at=cluster.now)
    cluster._handle(again)
    assert cluster.coordinator.fleet["rack-0/1"].status == "starting"
    cluster._handle(m.WorkerReady(gpu="rack-0/1", pid=old))
    assert cluster.coordinator.fleet["rack-0/1"].status == "starting"
    cluster.come_up("rack-0/1")
    cluster.run_steps(1)
    assert cluster.coordinator.fleet["rack-0/1"].status == "alive"
    assert len(cluster.events("gpu_failed")) == 1
    cluster.check()


def test_a_word_from_nowhere_is_an_event() -> None:
    cluster = running()
    cluster._handle(m.WorkerReady(gpu="rack-9/0", pid=1))
    assert len(cluster.events("unknown_gpu")) == 1
