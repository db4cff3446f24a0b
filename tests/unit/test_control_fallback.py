"""The state is lost everywhere: the run goes back to its newest checkpoint, and says so."""

from __future__ import annotations

import msgspec
import pytest

from runtime.config import CheckpointConfig
from runtime.control import messages as m
from storage.commands import Stop
from storage.records import RunRolledBack
from tests.support.control_cluster import SimCluster, running, sim_config
from tests.support.control_restart import restart_controller


def saving(*gpus: int, steps: int = 12, every: int = 5, **more: object) -> SimCluster:
    """A cluster that has committed `steps` steps and sealed a checkpoint every few."""
    config = msgspec.structs.replace(
        sim_config(*gpus, **more),  # type: ignore[arg-type]
        checkpoint=CheckpointConfig(every_steps=every),
    )
    cluster = SimCluster(config, checkpoints="/ckpt")
    cluster.run_steps(steps)
    assert cluster.seals
    return cluster


def rolled_back(cluster: SimCluster) -> list[RunRolledBack]:
    return [e for e in cluster.entries if isinstance(e, RunRolledBack)]


def test_all_holders_of_a_unit_die_and_the_others_go_on_from_the_checkpoint() -> None:
    cluster = saving(3, 3)
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    committed = cluster.committed
    cluster.kill("rack-1/0", "rack-1/1", "rack-1/2")
    cluster.run_until(lambda: bool(rolled_back(cluster)), 5.0)
    (back,) = rolled_back(cluster)
    assert (back.step, back.committed, back.checkpoint) == (10, committed, cluster.seals[-1].folder)
    (event,) = cluster.events("run_rolled_back")
    assert event.severity == "critical"
    assert f"steps 10 to {committed - 1} are lost and run again" in event.message
    assert "checkpoint at step 10" in event.message
    cluster.run_steps(committed - 10 + 2)
    assert cluster.shape() == [(0, 2), ()]
    plan = cluster.coordinator.plan
    assert plan is not None
    assert (plan.applied_step, plan.sources, plan.checkpoint) == (10, (), back.checkpoint)
    assert [s.step for s in cluster.line] == list(range(committed + 2))
    totals = cluster.coordinator.progress.ledger.totals(cluster.now)
    assert totals["recomputing"] > (committed - 10) * 0.5
    cluster.check()


def test_tokens_of_steps_that_are_run_again_count_once() -> None:
    cluster = saving(2, 2)
    committed = cluster.committed
    cluster.kill(*sorted(cluster.workers))
    cluster.run(1.0)
    cluster.fault("rack-0/0", "repair")
    cluster.run_until(lambda: cluster.committed == committed + 3, 120.0)
    ledger = cluster.coordinator.progress.ledger
    assert ledger.tokens == (committed + 3) * cluster.coordinator.progress.tokens_per_step
    cluster.check()


def test_no_gpu_is_left_and_the_run_waits_for_one() -> None:
    cluster = saving(3, 3)
    cluster.kill(*sorted(cluster.workers))
    cluster.run(60.0)
    assert cluster.finish is None
    state = cluster.coordinator.snapshot(cluster.now)
    assert state.status == "waiting"
    assert "no GPU is left: bring one back" in state.status_reason
    assert state.ledger["paused"] > 55.0
    for slot in range(3):
        assert cluster.fault(f"rack-1/{slot}", "repair").ok
    cluster.run_steps(5)
    assert cluster.shape() == [(), (0, 1, 2)], "those that came together start together"
    assert cluster.coordinator.snapshot(cluster.now).status == "running"
    cluster.fault("rack-0/2", "repair")
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_steps(5)
    assert cluster.shape() == [(2,), (0, 1, 2)]
    cluster.check()


def test_a_worker_that_came_back_empty_is_as_good_as_any_then() -> None:
    cluster = saving(2, 2)
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    cluster.fault("rack-0/1", "repair")
    cluster.run_steps(1)
    cluster.kill(*sorted(set(cluster.workers) - {"rack-0/1"}))
    cluster.run_until(lambda: bool(rolled_back(cluster)), 5.0)
    cluster.run_steps(4, 120.0)
    assert cluster.shape() == [(1,), ()]
    cluster.check()


def test_whole_replicas_train_and_broken_ones_stand_by_after_it() -> None:
    """A checkpoint fills every slot that lives, those of a replica that stood by too."""
    cluster = saving(2, 2, 2)
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    cluster.kill("rack-1/0")
    cluster.run_steps(1)
    cluster.fault("rack-0/1", "repair")
    cluster.run(1.0)
    cluster.kill("rack-2/0", "rack-2/1", "rack-1/1")
    cluster.run_until(lambda: bool(rolled_back(cluster)), 5.0)
    cluster.run_steps(4, 60.0)
    assert cluster.shape() == [(0, 1), (), ()]
    cluster.check()


@pytest.mark.parametrize("steps", [0, 30])
def test_without_a_checkpoint_the_end_says_how_to_avoid_it(steps: int) -> None:
    cluster = running(3, 3)
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    cluster.kill("rack-1/0", "rack-1/1", "rack-1/2")
    cluster.run(5.0)
    assert cluster.finish is not None
    assert cluster.finish.status == "failed"
    assert "state lost" in cluster.finish.reason
    assert "set checkpoint.every_steps" in cluster.finish.reason
    cluster.check()


def test_lost_again_on_the_way() -> None:
    """A failure while the checkpoint is read: who has the old state must not outvote the others."""
    cluster = saving(3, 3)
    cluster.kill("rack-0/1")
    cluster.run_steps(1)
    cluster.kill("rack-1/0", "rack-1/1", "rack-1/2")
    cluster.run_until(lambda: bool(rolled_back(cluster)), 5.0)
    cluster.run_until(lambda: cluster.coordinator.phase == "entering", 5.0)
    cluster.kill("rack-0/0")
    cluster.run_steps(5, 120.0)
    assert cluster.shape() == [(2,), ()]
    assert len(rolled_back(cluster)) == 1
    plan = cluster.coordinator.plan
    assert plan is not None
    assert plan.applied_step == 10
    cluster.check()


def test_lost_twice_in_a_row() -> None:
    cluster = saving(2, 2)
    for _ in range(2):
        cluster.kill(*sorted(cluster.workers))
        cluster.run(2.0)
        for gpu in sorted(cluster.host_of):
            cluster.fault(gpu, "repair")
        cluster.run_steps(3, 60.0)
    assert [back.step for back in rolled_back(cluster)] == [10, 10]
    assert cluster.shape() == [(0, 1), (0, 1)]
    cluster.check()


def test_lost_while_paused() -> None:
    from tests.unit.test_control_pause import pause, resume

    cluster = saving(2, 2)
    pause(cluster)
    cluster.kill(*sorted(cluster.workers))
    cluster.run(5.0)
    assert cluster.coordinator.snapshot(cluster.now).status == "paused"
    resume(cluster)
    cluster.run(1.0)
    cluster.fault("rack-1/1", "repair")
    cluster.run_steps(3, 120.0)
    assert cluster.shape() == [(), (1,)]
    cluster.check()


def test_a_lost_host_that_comes_back_brings_its_workers_up_by_itself() -> None:
    cluster = saving(2, 2)
    cluster.disconnect("localhost")
    cluster.workers.clear()
    cluster._carry_out(cluster.coordinator.host_lost("localhost", cluster.now))
    cluster.run(5.0)
    assert cluster.coordinator.snapshot(cluster.now).status == "waiting"
    cluster._kept.clear()
    cluster.cut.clear()
    hello = msgspec.structs.replace(cluster._hello("localhost"), pid=2)
    cluster._to_controller("localhost", hello)
    cluster.run_steps(4, 60.0)
    assert cluster.shape() == [(0, 1), (0, 1)]
    cluster.check()


def test_stopped_while_it_waits() -> None:
    cluster = saving(2, 2)
    cluster.kill(*sorted(cluster.workers))
    cluster.run(5.0)
    assert cluster.submit(Stop(id="s", at=cluster.now, who="ada", via="cli")).ok
    cluster.run(1.0)
    assert cluster.finish is not None
    assert cluster.finish.status == "stopped"
    cluster.check()


@pytest.mark.parametrize("steps_after", [0, 2])
def test_outlives_the_controller(steps_after: int) -> None:
    cluster = saving(2, 2)
    cluster.kill(*sorted(cluster.workers))
    cluster.run(5.0)
    if steps_after:
        cluster.fault("rack-0/0", "repair")
        cluster.run_steps(steps_after, 60.0)
    restart_controller(cluster)
    assert cluster.committed == 10 + steps_after
    if not steps_after:
        cluster.run(2.0)
        assert cluster.coordinator.snapshot(cluster.now).status == "waiting"
        cluster.fault("rack-0/0", "repair")
    cluster.run_steps(4, 60.0)
    assert cluster.ordered(m.EnterGeneration)[-1].plan.applied_step >= 10
    assert [s.step for s in cluster.line] == list(range(cluster.committed))
    ledger = cluster.coordinator.progress.ledger
    assert ledger.tokens == cluster.committed * cluster.coordinator.progress.tokens_per_step
    cluster.check()
