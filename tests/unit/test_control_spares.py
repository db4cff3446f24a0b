"""Hot spares: a dead slot's place is taken live; the repaired GPU is the next spare."""

from __future__ import annotations

import msgspec
import pytest

from runtime.config import CheckpointConfig, PolicyConfig
from runtime.control import messages as m
from storage.records import Option, Proposal
from tests.support.control_cluster import SimCluster, sim_config
from tests.support.control_restart import restart_controller


def with_spares(
    *gpus: int, spares: int = 1, budget_w: float = 0.0, checkpoints: str = "", **more: object
) -> SimCluster:
    config = sim_config(*gpus, **more)  # type: ignore[arg-type]
    racks = tuple(
        msgspec.structs.replace(rack, spares=spares, power_budget_w=budget_w)
        for rack in config.cluster.racks
    )
    cluster = msgspec.structs.replace(config.cluster, racks=racks)
    config = msgspec.structs.replace(
        config, cluster=cluster, checkpoint=CheckpointConfig(every_steps=3)
    )
    made = SimCluster(config, checkpoints=checkpoints)
    made.run_steps(4)
    return made


def option(proposal: Proposal, kind: str) -> Option:
    return next(one for one in proposal.options if one.kind == kind)


def gpus(cluster: SimCluster, replica: int = 0) -> tuple[str, ...]:
    plan = cluster.coordinator.plan
    assert plan is not None
    return plan.replicas[replica].gpus


def test_a_spare_runs_but_trains_nothing_and_draws_the_least() -> None:
    cluster = with_spares(3, 3)
    assert set(cluster.workers) == set(cluster.host_of)
    assert "rack-0/3" in cluster.workers
    plan = cluster.coordinator.plan
    assert plan is not None
    assert "rack-0/3" not in plan.members()
    assert cluster.ranks.caps_w["rack-0/3"] == 0.0
    state = cluster.coordinator.snapshot(cluster.now)
    assert [one.spares for one in state.replicas] == [("rack-0/3",), ("rack-1/3",)]
    assert not cluster.proposals


def test_it_takes_the_place_of_a_dead_slot_and_nobody_is_replaced_or_loses_a_step() -> None:
    cluster = with_spares(3, 3)
    pids = {gpu: worker.pid for gpu, worker in cluster.workers.items()}
    cluster.kill("rack-0/1")
    proposal = cluster.wait_for_proposal(0)
    assert proposal.kind == "replace"
    found = option(proposal, "replace")
    assert found.title == "Put rack-0/3 into slot 1 of replica 0"
    assert found.shape == ((0, 1, 2), (0, 1, 2))
    assert found.goodput > option(proposal, "shrink").goodput
    assert found.gpus == ("rack-0/0", "rack-0/3", "rack-0/2")
    assert cluster.approve(proposal).ok
    cluster.run_until(lambda: cluster.proposals[proposal.id].state == "applied")
    assert cluster.shape() == [(0, 1, 2), (0, 1, 2)]
    assert gpus(cluster) == ("rack-0/0", "rack-0/3", "rack-0/2")
    cluster.run_steps(2)
    assert cluster.ranks.caps_w["rack-0/3"] == cluster.config.emulated.normal_cap_w
    assert {g: w.pid for g, w in cluster.workers.items()} == {
        g: pid for g, pid in pids.items() if g != "rack-0/1"
    }
    assert cluster.coordinator.snapshot(cluster.now).replicas[0].spares == ()
    cluster.check()


def test_the_repaired_gpu_is_the_next_spare() -> None:
    cluster = with_spares(3, 3)
    cluster.kill("rack-0/1")
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_until(lambda: cluster.shape()[0] == (0, 1, 2))
    cluster.run_steps(2)
    assert cluster.fault("rack-0/1", "repair").ok
    cluster.run_steps(2)
    assert cluster.events("gpu_repaired")[-1].message == "rack-0/1 is back, as a spare"
    assert cluster.coordinator.fleet.spares(0) == ("rack-0/1",)
    assert cluster.open_for(0) is None
    cluster.kill("rack-0/2")
    proposal = cluster.wait_for_proposal(0)
    assert option(proposal, "replace").gpus == ("rack-0/0", "rack-0/3", "rack-0/1")
    assert cluster.approve(proposal).ok
    cluster.run_until(lambda: cluster.shape()[0] == (0, 1, 2))
    cluster.run_steps(2)
    cluster.check()


def test_more_dead_slots_than_spares() -> None:
    cluster = with_spares(4, 4)
    cluster.kill("rack-0/1", "rack-0/3")
    proposal = cluster.wait_for_proposal(0)
    found = option(proposal, "replace")
    assert found.title == "Put rack-0/4 into slot 1 of replica 0; 3 of 4 slots"
    assert cluster.approve(proposal, "replace").ok
    cluster.run_until(lambda: cluster.shape()[0] == (0, 1, 2))
    cluster.run_steps(2)
    cluster.check()


def test_without_a_spare_it_says_so() -> None:
    cluster = with_spares(3, 3)
    cluster.kill("rack-0/3")
    cluster.run_steps(1)
    (event,) = cluster.events("spare_failed")
    assert (event.severity, event.gpu) == ("warning", "rack-0/3")
    assert not cluster.events("gpu_failed")
    assert not cluster.events("generation_aborted")
    cluster.kill("rack-0/1")
    proposal = cluster.wait_for_proposal(0)
    assert proposal.kind in ("shrink", "shrink_boost")
    assert option(proposal, "replace").reason == "no spare is left"
    cluster.check()


def test_a_spare_that_appears_makes_a_new_proposal() -> None:
    """Also for a replica that has shrunk already: it can be whole again."""
    cluster = with_spares(3, 3)
    cluster.kill("rack-0/3", "rack-0/1")
    shrink = cluster.wait_for_proposal(0)
    assert cluster.approve(shrink).ok
    cluster.run_until(lambda: cluster.shape()[0] == (0, 2))
    cluster.run_steps(1)
    assert cluster.open_for(0) is None
    assert cluster.fault("rack-0/3", "repair").ok
    proposal = cluster.wait_for_proposal(0)
    assert proposal.kind == "replace"
    assert cluster.approve(proposal).ok
    cluster.run_until(lambda: cluster.shape()[0] == (0, 1, 2))
    cluster.run_steps(2)
    cluster.check()


def test_who_chose_to_shrink_is_not_asked_again() -> None:
    cluster = with_spares(3, 3)
    cluster.kill("rack-0/1")
    proposal = cluster.wait_for_proposal(0)
    shrink = [one.kind for one in proposal.options].index("shrink")
    assert cluster.decide(proposal, option=shrink, reason="the spare is for tonight").ok
    cluster.run_until(lambda: cluster.shape()[0] == (0, 2))
    cluster.run_steps(3)
    assert cluster.open_for(0) is None
    cluster.check()


def test_the_spare_dies_before_it_has_joined() -> None:
    cluster = with_spares(3, 3)
    cluster.kill("rack-0/1")
    proposal = cluster.wait_for_proposal(0)
    assert cluster.approve(proposal).ok
    cluster.kill("rack-0/3")
    cluster.run_steps(3)
    assert cluster.proposals[proposal.id].state == "failed"
    assert cluster.shape() == [(), (0, 1, 2)]
    # Whichever comes back first completes the replica.
    cluster.fault("rack-0/1", "repair")
    cluster.run_until(lambda: (p := cluster.open_for(0)) is not None and p.kind == "replace")
    open_one = cluster.open_for(0)
    assert open_one is not None
    assert cluster.approve(open_one).ok
    cluster.run_until(lambda: cluster.shape()[0] == (0, 1, 2))
    assert gpus(cluster) == ("rack-0/0", "rack-0/1", "rack-0/2")
    cluster.run_steps(2)
    cluster.check()


def test_one_that_is_about_to_fail_is_replaced_before_it_does() -> None:
    from storage.commands import Report

    cluster = with_spares(3, 3)
    report = Report(
        id="r1", at=cluster.now, who="ada", via="cli", gpu="rack-0/1", state="draining", reason="x"
    )
    assert cluster.submit(report).ok
    proposal = cluster.wait_for_proposal(0)
    assert proposal.kind == "replace"
    assert cluster.approve(proposal).ok
    cluster.run_until(lambda: cluster.proposals[proposal.id].state == "applied")
    assert gpus(cluster) == ("rack-0/0", "rack-0/3", "rack-0/2")
    assert not cluster.events("generation_aborted")
    cluster.run_steps(2)
    # It lives, but is no spare: it is not fit.
    cluster.kill("rack-0/2")
    assert option(cluster.wait_for_proposal(0), "replace").reason == "no spare is left"
    cluster.check()


def test_policy_may_do_it_unasked() -> None:
    cluster = with_spares(3, 3, policy=PolicyConfig(replace="auto"))
    cluster.kill("rack-0/1")
    cluster.run_until(lambda: gpus(cluster)[1] == "rack-0/3" and cluster.shape()[0] == (0, 1, 2))
    assert [d.who for d in cluster.decisions] == ["policy"]
    cluster.run_steps(2)
    cluster.check()


def test_what_idle_spares_draw_is_not_there_for_a_boost() -> None:
    cluster = with_spares(3, 3, spares=2, budget_w=4000.0)

    def planned_w() -> float:
        situation = cluster.coordinator.desk.situation(cluster.coordinator)
        return situation.config.cluster.racks[0].power_budget_w

    least_w = cluster.config.emulated.min_cap_w
    assert planned_w() == 4000.0 - 2 * least_w
    cluster.kill("rack-0/4")
    cluster.run_steps(1)
    assert planned_w() == 4000.0 - least_w


def test_back_to_a_checkpoint_spares_fill_the_dead_slots_at_once() -> None:
    cluster = with_spares(3, 3, checkpoints="/ckpt")
    cluster.run_until(lambda: bool(cluster.seals))
    cluster.kill(*(gpu for gpu in cluster.host_of if gpu not in ("rack-0/0", "rack-0/3")))
    cluster.run_until(lambda: bool(cluster.events("run_rolled_back")), 5.0)
    cluster.run_steps(5)
    assert cluster.shape() == [(0, 1), ()]
    assert gpus(cluster) == ("rack-0/0", "rack-0/3", "rack-0/2")
    assert [event.gpu for event in cluster.events("spare_seated")] == ["rack-0/3"]
    cluster.check()


@pytest.mark.parametrize("before", [True, False])
def test_seats_outlive_the_controller(before: bool) -> None:
    cluster = with_spares(3, 3)
    cluster.kill("rack-0/1")
    proposal = cluster.wait_for_proposal(0)
    assert cluster.approve(proposal).ok
    if not before:
        cluster.run_until(lambda: cluster.proposals[proposal.id].state == "applied")
        cluster.run_steps(1)
    restart_controller(cluster)
    cluster.run_until(lambda: cluster.proposals[proposal.id].state == "applied")
    cluster.run_steps(2)
    assert gpus(cluster) == ("rack-0/0", "rack-0/3", "rack-0/2")
    assert cluster.ordered(m.EnterGeneration)[-1].plan.replicas[0].gpus == gpus(cluster)
    cluster.check()


def test_a_replacement_of_a_shrunken_replica_is_taken_back_to_what_it_was() -> None:
    cluster = with_spares(3, 3)
    cluster.kill("rack-0/3", "rack-0/1")
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_until(lambda: cluster.shape()[0] == (0, 2))
    assert cluster.fault("rack-0/3", "repair").ok
    proposal = cluster.wait_for_proposal(0)
    assert cluster.approve(proposal).ok
    cluster.run_until(lambda: cluster.proposals[proposal.id].state == "applied")
    cluster.run_steps(1)
    assert cluster.undo(cluster.proposals[proposal.id]).ok
    inverse = cluster.wait_for_proposal(0)
    assert cluster.approve(inverse).ok
    cluster.run_until(lambda: cluster.shape()[0] == (0, 2))
    cluster.run_steps(2)
    cluster.check()
