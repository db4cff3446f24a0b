"""How a run starts and how it ends, over simulated workers."""

from __future__ import annotations

from runtime.config import ControlConfig
from runtime.control import messages as m
from tests.support.control_cluster import SimCluster, running, sim_config

# starting ----------------------------------------------------------------------------------------


def test_starts_when_all_workers_are_up() -> None:
    cluster = SimCluster(sim_config(3, 3))
    cluster.run_steps(1)
    assert cluster.shape() == [(0, 1, 2), (0, 1, 2)]
    assert cluster.now - cluster.began_at < 1.0
    cluster.check()


def test_starts_without_the_late_at_the_deadline_and_takes_them_in_later() -> None:
    config = sim_config(3, 3, control=ControlConfig(join_deadline_s=5.0))
    cluster = SimCluster(config, slow_start={"rack-0/2"})
    cluster.run(4.9)
    assert cluster.coordinator.phase == "starting"
    assert cluster.coordinator.snapshot(cluster.now).status_reason == "5 of 6 workers are up"
    cluster.run_steps(1, seconds=3.0)
    assert cluster.shape() == [(), (0, 1, 2)]
    assert cluster.wait_for_proposal(0).kind in ("shrink", "shrink_boost")
    cluster.come_up("rack-0/2")
    cluster.run_until(lambda: cluster.open_for(0).kind == "grow")  # type: ignore[union-attr]
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_steps(3)
    assert cluster.shape() == [(0, 1, 2), (0, 1, 2)]
    cluster.check()


def test_a_worker_that_dies_at_the_start_does_not_hold_up_the_rest() -> None:
    cluster = SimCluster(sim_config(2, 2), slow_start={"rack-0/1"})
    cluster.run(1.0)
    cluster.come_up("rack-0/1")
    cluster.workers["rack-0/1"].silent = True
    # It dies before its word that it is ready arrives.
    cluster.kill("rack-0/1")
    cluster.run_steps(1, seconds=3.0)
    cluster.check()


def test_no_worker_comes_up() -> None:
    everyone = {f"rack-{r}/{s}" for r in range(2) for s in range(2)}
    cluster = SimCluster(sim_config(2, 2), slow_start=everyone)
    cluster.run(1.0)
    for gpu in sorted(everyone):
        reason = m.WorkerFailed(gpu=gpu, reason="`train.text` is too short")
        cluster.coordinator.handle(reason, cluster.now)
        exited = m.WorkerExited(gpu=gpu, pid=7, code=1, at=cluster.now)
        cluster._handle(exited)
    cluster.run(1.0)
    assert cluster.finish is not None
    assert cluster.finish.status == "failed"
    assert "too short" in cluster.finish.reason


def test_waits_for_an_agent_however_long() -> None:
    cluster = SimCluster(sim_config(2, 2), slow_start={"rack-0/0", "rack-0/1"})
    for gpu in ("rack-1/0", "rack-1/1"):
        cluster.slow_start |= {gpu}
    cluster.run(120.0)
    assert cluster.coordinator.phase == "starting"
    assert cluster.finish is None


# the end -----------------------------------------------------------------------------------------


def test_ends_after_the_configured_steps() -> None:
    cluster = SimCluster(sim_config(2, 2, steps=5))
    cluster.run_until(lambda: cluster.finish is not None)
    assert cluster.finish is not None
    assert (cluster.finish.status, cluster.committed) == ("stopped", 5)
    cluster.check()


def test_who_parks_first_at_the_end_has_not_left_by_itself() -> None:
    """The last step is told by rank 0; others may say that they are out before it."""
    cluster = SimCluster(sim_config(2, 2, steps=4, hosts=("a", "b")))
    cluster.run_steps(3)
    cluster.disconnect("a")
    cluster.run(1.0)
    cluster.reconnect("a")
    cluster.run_until(lambda: cluster.finish is not None)
    assert not cluster.events("generation_aborted")
    assert cluster.committed == 4
    cluster.check()


def test_a_failure_at_the_last_step_adds_no_step() -> None:
    cluster = SimCluster(sim_config(2, 2, steps=4))
    cluster.run_steps(3)
    cluster.commit_on(*sorted(cluster.workers))
    cluster.kill("rack-0/1")
    cluster.run_until(lambda: cluster.finish is not None)
    assert cluster.committed == 4
    cluster.check()


def test_stops_at_a_boundary() -> None:
    cluster = running()
    cluster.coordinator.finish("stopped", "enough", cluster.now)
    cluster._carry_out(cluster.coordinator.outgoing.take())
    cluster.run_until(lambda: cluster.finish is not None)
    assert cluster.finish is not None
    assert cluster.finish.reason == "enough"
    assert cluster.committed == 4
    assert not cluster.events("generation_aborted")
    cluster.check()


def test_a_failure_on_the_way_to_a_stop_is_got_over_and_the_run_still_stops() -> None:
    cluster = running()
    cluster.coordinator.finish("stopped", "enough", cluster.now)
    cluster._carry_out(cluster.coordinator.outgoing.take())
    cluster.kill("rack-0/0")
    cluster.run_until(lambda: cluster.finish is not None)
    assert cluster.finish is not None
    assert (cluster.finish.status, cluster.finish.reason) == ("stopped", "enough")
    assert cluster.committed == 4
    assert not any(p.state == "open" for p in cluster.proposals.values())
    cluster.check()


def test_a_stop_while_a_change_drops_the_step_at_hand_still_leaves_a_checkpoint() -> None:
    cluster = SimCluster(sim_config(3, 3), checkpoints="/ckpt")
    cluster.run_steps(4)
    cluster.kill("rack-0/1")
    cluster.run_steps(3)
    cluster.approve(cluster.wait_for_proposal(0))
    assert cluster.coordinator.change.at_once
    # Some had just come out of the commit.
    cluster.commit_on("rack-1/0")
    cluster.coordinator.finish("stopped", "enough", cluster.now)
    cluster._carry_out(cluster.coordinator.outgoing.take())
    cluster.run_until(lambda: cluster.finish is not None)
    (seal,) = cluster.seals
    assert seal.manifest.applied_step == cluster.committed
    assert not cluster.events("checkpoint_failed")
    cluster.check()


def test_stopped_at_once_when_asked_again() -> None:
    cluster = running()
    cluster.stop("rack-0/0")
    cluster.coordinator.finish("stopped", "enough", cluster.now)
    cluster.coordinator.end_now("enough, now", cluster.now)
    cluster._carry_out(cluster.coordinator.outgoing.take())
    assert cluster.finish is not None
    assert cluster.finish.reason == "enough, now"
    cluster.check()


def test_writes_a_last_checkpoint_of_every_rank() -> None:
    cluster = SimCluster(sim_config(2, 2), checkpoints="/ckpt")
    cluster.run_steps(3)
    cluster.coordinator.finish("stopped", "enough", cluster.now)
    cluster._carry_out(cluster.coordinator.outgoing.take())
    cluster.run_until(lambda: cluster.finish is not None)
    (seal,) = cluster.seals
    assert seal.manifest.applied_step == cluster.committed
    assert len(seal.manifest.parts) == 4
    cluster.check()


def test_no_checkpoint_of_ranks_that_are_a_step_apart() -> None:
    """The last step was committed in part when a rank died: another generation would add a step."""
    cluster = SimCluster(sim_config(2, 2, steps=4), checkpoints="/ckpt")
    cluster.run_steps(3)
    cluster.commit_on("rack-1/0")
    cluster.kill("rack-0/1")
    cluster.run_until(lambda: cluster.finish is not None)
    assert cluster.committed == 4
    assert not cluster.seals
    assert "a step apart" in cluster.events("checkpoint_failed")[0].message
    cluster.check()


def test_a_rank_that_dies_while_saving_is_not_waited_for() -> None:
    cluster = SimCluster(sim_config(2, 2), checkpoints="/ckpt")
    cluster.run_steps(3)
    cluster.stop("rack-0/1")
    for gpu in sorted(cluster.workers):
        if gpu != "rack-0/1":
            cluster.workers[gpu].leaving = True
    cluster.workers["rack-0/1"].silent = False
    cluster.coordinator.finish("stopped", "enough", cluster.now)
    cluster._carry_out(cluster.coordinator.outgoing.take())
    cluster.run_until(lambda: cluster.coordinator.phase == "saving")
    cluster.kill("rack-0/1")
    began = cluster.now
    cluster.run_until(lambda: cluster.finish is not None)
    assert cluster.now - began < 1.0
    (seal,) = cluster.seals
    assert "rack-0/0.pt" in {part.file for part in seal.manifest.parts}
    cluster.check()
