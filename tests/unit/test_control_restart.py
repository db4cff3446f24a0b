"""A planned restart: every process is replaced, from a checkpoint of that very step."""

from __future__ import annotations

import pytest

from runtime.control import messages as m
from storage.records import Proposal, RunRolledBack
from tests.support.control_cluster import SimCluster, running
from tests.support.control_restart import restart_controller


def checkpointed(*gpus: int, steps: int = 4) -> SimCluster:
    cluster = SimCluster(running(*gpus).config, checkpoints="/ckpt")
    cluster.run_steps(steps)
    return cluster


def asked(cluster: SimCluster, replica: int = 0) -> Proposal:
    """Somebody asks for a restart; it has to be approved like anything else."""
    assert cluster.trigger(replica, "restart").ok
    proposal = cluster.wait_for_proposal(replica)
    assert proposal.kind == "restart"
    return proposal


def applied(cluster: SimCluster, proposal: Proposal) -> None:
    cluster.run_until(lambda: cluster.proposals[proposal.id].state == "applied", 60.0)


def test_all_processes_are_replaced_and_no_step_is_lost() -> None:
    cluster = checkpointed(3, 3)
    pids = {gpu: worker.pid for gpu, worker in cluster.workers.items()}
    proposal = asked(cluster)
    committed = cluster.committed
    assert cluster.approve(proposal).ok
    applied(cluster, proposal)
    cluster.run_steps(3)
    assert set(cluster.workers) == set(pids)
    assert not set(pids.values()) & {worker.pid for worker in cluster.workers.values()}
    assert [s.step for s in cluster.steps] == list(range(cluster.committed)), "none twice"
    (back,) = [e for e in cluster.entries if isinstance(e, RunRolledBack)]
    assert back.step == back.committed >= committed
    assert back.checkpoint == cluster.seals[-1].folder
    plan = cluster.coordinator.plan
    assert plan is not None
    assert plan.sources == ()
    assert not cluster.events("gpu_failed"), "a process we end has not failed"
    assert not cluster.events("gpu_repaired")
    assert len(cluster.events("run_restarted")) == 1
    assert cluster.coordinator.progress.ledger.totals(cluster.now)["paused"] == 0.0
    cluster.check()


def test_its_predicted_cost_is_what_a_start_took() -> None:
    cluster = checkpointed(3, 3)
    first = asked(cluster)
    costs = {option.kind: option.cost_s for option in first.options}
    assert costs["restart"] == pytest.approx(cluster.formed[0].reconfigure_s, abs=0.01)
    assert cluster.approve(first).ok
    applied(cluster, first)
    cluster.run_steps(2)
    outcome = cluster.proposals[first.id].outcome
    assert outcome is not None
    again = next(o for o in asked(cluster).options if o.kind == "restart")
    assert again.cost_s == pytest.approx(cluster.formed[-1].reconfigure_s, abs=0.01)
    costs_now = cluster.coordinator.desk.followup.costs
    assert costs_now.reconfigure_s <= costs_now.restart_s, "which has to do more"


def test_a_broken_replica_restarts_with_what_it_has() -> None:
    cluster = checkpointed(3, 3)
    cluster.kill("rack-0/1")
    proposal = cluster.wait_for_proposal(0)
    assert cluster.approve(proposal, "restart").ok
    applied(cluster, proposal)
    assert cluster.shape() == [(0, 2), (0, 1, 2)]
    cluster.run_steps(2)
    cluster.check()


def test_a_failure_on_the_way_calls_it_off() -> None:
    cluster = checkpointed(3, 3)
    pids = {gpu: worker.pid for gpu, worker in cluster.workers.items()}
    proposal = asked(cluster)
    assert cluster.approve(proposal).ok
    cluster.kill("rack-1/2")
    cluster.run_steps(3)
    assert cluster.proposals[proposal.id].state == "failed"
    assert {worker.pid for worker in cluster.workers.values()} <= set(pids.values())
    assert cluster.shape() == [(0, 1, 2), ()]
    cluster.check()


def test_without_its_checkpoint_nothing_is_given_up() -> None:
    """A rank cannot write: the run goes on with the processes it has."""
    cluster = checkpointed(3, 3)
    pids = {gpu: worker.pid for gpu, worker in cluster.workers.items()}
    proposal = asked(cluster)
    assert cluster.approve(proposal).ok
    cluster.run_until(lambda: cluster.coordinator.phase == "saving", 10.0)
    cluster._handle(m.Saved(gpu="rack-0/0", error="the disk is full"))
    committed = cluster.committed
    cluster.run_steps(2)
    found = cluster.proposals[proposal.id]
    assert found.state == "failed"
    assert "no checkpoint could be written" in found.state_reason
    assert pids == {gpu: worker.pid for gpu, worker in cluster.workers.items()}
    assert cluster.committed >= committed + 2
    assert cluster.shape() == [(0, 1, 2), (0, 1, 2)]
    cluster.check()


def test_a_process_that_does_not_come_up_again_is_left_out() -> None:
    cluster = checkpointed(3, 3)
    proposal = asked(cluster)
    cluster.slow_start |= {"rack-0/2"}
    assert cluster.approve(proposal).ok
    cluster.run_until(lambda: cluster.proposals[proposal.id].is_final, 90.0)
    cluster.run_steps(2)
    assert cluster.shape() == [(), (0, 1, 2)]
    assert cluster.events("gpu_failed")[0].message.endswith("it did not come up in time")
    cluster.come_up("rack-0/2")
    cluster.run_until(lambda: (p := cluster.open_for(0)) is not None and p.kind == "grow")
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_steps(3)
    assert cluster.shape() == [(0, 1, 2), (0, 1, 2)]
    cluster.check()


@pytest.mark.parametrize("phase", ["saving", "restoring"])
def test_the_controller_is_killed_in_the_middle(phase: str) -> None:
    cluster = checkpointed(3, 3)
    pids = {worker.pid for worker in cluster.workers.values()}
    proposal = asked(cluster)
    assert cluster.approve(proposal).ok
    cluster.run_until(lambda: cluster.coordinator.phase == phase, 20.0)
    restart_controller(cluster)
    applied(cluster, proposal)
    cluster.run_steps(2)
    assert not pids & {worker.pid for worker in cluster.workers.values()}
    assert cluster.shape() == [(0, 1, 2), (0, 1, 2)]
    assert [s.step for s in cluster.line] == list(range(cluster.committed))
    cluster.check()


def test_it_cannot_be_taken_back() -> None:
    cluster = checkpointed(3, 3)
    proposal = asked(cluster)
    assert cluster.approve(proposal).ok
    applied(cluster, proposal)
    result = cluster.undo(cluster.proposals[proposal.id])
    assert not result.ok
    assert "that cannot be taken back" in result.message
