"""What people ask for by hand, and the faults they inject: checked, answered, carried out."""

from __future__ import annotations

import msgspec
import pytest

from runtime.control import messages as m
from tests.support.control_cluster import SimCluster, refused, sim_config, waiting

# by hand -----------------------------------------------------------------------------------------


def test_what_is_asked_for_by_hand_takes_the_place_of_what_was_proposed() -> None:
    cluster, proposal = waiting()
    assert cluster.trigger(0, "drop").ok
    asked = cluster.wait_for_proposal(0)
    assert asked.kind == "drop"
    assert asked.cause == "asked for by ada"
    assert cluster.proposals[proposal.id].state == "stale"
    assert cluster.decide(asked, "rejected").ok
    # What the planner would propose is proposed again.
    assert cluster.wait_for_proposal(0).kind == proposal.kind
    cluster.check()


@pytest.mark.parametrize(
    ("replica", "kind", "words"),
    [
        (0, "replace", "no spare configured"),
        (0, "restart", "no folder for checkpoints"),
        (1, "grow", "no GPU of replica 1 has come back"),
        (7, "drop", "choose 0 to 1"),
        (1, "drop", "no other replica trains"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    replica: int, kind: str, words: str
) -> None:
    cluster, proposal = waiting()
    result = cluster.trigger(replica, kind)
    assert refused(cluster, "invalid")
    assert words in result.message
    assert cluster.open_for(0) == proposal
    cluster.check()


def test_nothing_else_is_asked_for_a_replica_whose_change_is_under_way() -> None:
    cluster, proposal = waiting()
    cluster.run_steps(1)
    cluster.approve(proposal)
    cluster.run_until(lambda: cluster.coordinator.phase == "entering")
    result = cluster.trigger(0, "drop")
    assert refused(cluster, "invalid")
    assert f"{proposal.id} is being carried out" in result.message
    cluster.run_steps(2)
    cluster.check()


def test_nothing_can_be_asked_for_before_the_start() -> None:
    cluster = SimCluster(sim_config(2, 2), slow_start={"rack-0/0"})
    cluster.run(1.0)
    result = cluster.trigger(0, "drop")
    assert "still starting" in result.message


# faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "kind", "factor", "code", "words"),
    [
        ("rack-0/9", "kill", 1.0, "unknown", "the run has rack-0/0..2, rack-1/0..2"),
        ("rack-0/1", "kill", 1.0, "invalid", "no live worker"),
        ("rack-0/0", "repair", 1.0, "invalid", "nothing to repair"),
        ("rack-0/0", "slow", 0.5, "invalid", "allowed: 1.0 to 100.0"),
    ],
)
def test_faults_are_checked(gpu: str, kind: str, factor: float, code: str, words: str) -> None:
    cluster, _ = waiting()
    result = cluster.fault(gpu, kind, factor)
    assert refused(cluster, code)
    assert words in result.message


def test_faults_only_on_emulated_devices() -> None:
    config = sim_config(2, 2)
    cluster_config = msgspec.structs.replace(config.cluster, device="cuda", backend="nccl")
    cluster = SimCluster(msgspec.structs.replace(config, cluster=cluster_config))
    cluster.run_steps(2)
    for kind in ("kill", "hang", "slow"):
        cluster.fault("rack-0/0", kind, 2.0)
        assert refused(cluster, "not_allowed")


def test_repairing_twice_starts_one_worker() -> None:
    cluster, _ = waiting()
    cluster.slow_start |= {"rack-0/1"}
    assert cluster.fault("rack-0/1", "repair").ok
    assert not cluster.fault("rack-0/1", "repair").ok
    cluster.come_up("rack-0/1")
    cluster.run_steps(1)
    assert [o.gpus for o in cluster.ordered(m.StartWorkers)][1:] == [("rack-0/1",)]


def test_slowness_ends_with_repair_and_with_the_worker() -> None:
    cluster = SimCluster(sim_config(3, 3))
    cluster.run_steps(2)
    assert cluster.fault("rack-0/1", "slow", 2.0).ok
    cluster.run_steps(3)
    assert cluster.steps[-1].step_s > 1.5 * cluster.steps[0].step_s
    assert cluster.fault("rack-0/1", "repair").ok
    cluster.run_steps(3)
    assert cluster.steps[-1].step_s == pytest.approx(cluster.steps[0].step_s, rel=0.05)
    assert cluster.fault("rack-0/1", "slow", 2.0).ok
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    assert cluster.coordinator.fleet["rack-0/1"].slowness == 1.0
    cluster.check()
