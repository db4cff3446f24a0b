"""Pause and resume: the run stands still at a boundary and loses nothing."""

from __future__ import annotations

import pytest

from storage.commands import Pause, Resume
from storage.records import LedgerSpent
from tests.support.control_cluster import SimCluster, refused, running, waiting
from tests.support.control_restart import restart_controller


def pause(cluster: SimCluster, reason: str = "") -> None:
    command = Pause(id=f"pause-{cluster.now}", at=cluster.now, who="ada", via="cli", reason=reason)
    assert cluster.submit(command).ok
    cluster.run_until(lambda: cluster.coordinator.phase == "paused", 5.0)


def resume(cluster: SimCluster) -> None:
    command = Resume(id=f"resume-{cluster.now}", at=cluster.now, who="ada", via="cli")
    assert cluster.submit(command).ok


def spent(cluster: SimCluster, bucket: str) -> float:
    return cluster.coordinator.progress.ledger.totals(cluster.now)[bucket]


def test_stands_still_at_a_boundary_and_goes_on_without_losing_a_step() -> None:
    cluster = running(3, 3)
    pids = {gpu: worker.pid for gpu, worker in cluster.workers.items()}
    pause(cluster, "inspection")
    committed = cluster.committed
    cluster.run(100.0)
    state = cluster.coordinator.snapshot(cluster.now)
    assert (state.status, state.status_reason) == ("paused", "paused by ada: inspection")
    assert state.tokens_per_s == 0.0
    assert state.ledger["paused"] == pytest.approx(100.0, abs=1.0)
    assert cluster.committed == committed
    told = [e for e in cluster.entries if isinstance(e, LedgerSpent) and e.bucket == "paused"]
    assert len(told) >= 9, "the journal goes on while the run stands still"
    resume(cluster)
    cluster.run_steps(3)
    assert [s.step for s in cluster.steps] == list(range(committed + 3))
    assert pids == {gpu: worker.pid for gpu, worker in cluster.workers.items()}
    assert spent(cluster, "paused") == pytest.approx(100.0, abs=1.0)
    assert [e.message for e in cluster.events("run_resumed")] == ["The run is resumed by ada."]
    assert cluster.shape() == [(0, 1, 2), (0, 1, 2)]
    plan = cluster.coordinator.plan
    assert plan is not None
    assert plan.planned
    assert not cluster.events("generation_aborted")
    cluster.check()


def test_what_makes_no_sense_is_refused_with_the_reason() -> None:
    cluster = running(2, 2)
    early = Resume(id="r0", at=cluster.now, who="ada", via="cli")
    assert cluster.submit(early).message == "the run is not paused"
    pause(cluster)
    again = Pause(id="p1", at=cluster.now, who="bob", via="cli")
    assert cluster.submit(again).message == "the run is paused by ada already"
    assert "resume it first" in cluster.trigger(0, "drop").message
    assert refused(cluster, "invalid")
    fresh = SimCluster(cluster.config)
    assert fresh.submit(again).message == "the run is still starting"


def test_a_gpu_that_fails_while_paused_is_left_out_afterwards() -> None:
    cluster = running(3, 3)
    pause(cluster)
    cluster.kill("rack-0/1")
    cluster.run(20.0)
    assert cluster.coordinator.phase == "paused"
    assert len(cluster.events("gpu_failed")) == 1
    resume(cluster)
    cluster.run_steps(2)
    assert cluster.shape() == [(), (0, 1, 2)]
    assert cluster.wait_for_proposal(0).kind in ("shrink", "shrink_boost")
    assert spent(cluster, "paused") > 19.0
    cluster.check()


def test_a_gpu_that_fails_and_comes_back_while_paused() -> None:
    """Its fresh worker holds nothing: the others have the state."""
    cluster = running(3, 3)
    pause(cluster)
    cluster.kill("rack-0/1")
    cluster.run(1.0)
    assert cluster.fault("rack-0/1", "repair").ok
    cluster.run(2.0)
    resume(cluster)
    cluster.run_steps(3)
    assert cluster.shape() == [(0, 1, 2), (0, 1, 2)]
    cluster.check()


def test_a_failure_on_the_way_to_the_pause() -> None:
    cluster = running(3, 3)
    command = Pause(id="p", at=cluster.now, who="ada", via="cli")
    assert cluster.submit(command).ok
    cluster.kill("rack-1/0")
    cluster.run_until(lambda: cluster.coordinator.phase == "paused", 5.0)
    committed = cluster.committed
    cluster.run(30.0)
    assert cluster.committed == committed
    resume(cluster)
    cluster.run_steps(2)
    assert cluster.shape() == [(0, 1, 2), ()]
    cluster.check()


def test_resumed_before_it_stood_still() -> None:
    cluster = running(3, 3)
    assert cluster.submit(Pause(id="p", at=cluster.now, who="ada", via="cli")).ok
    resume(cluster)
    cluster.run_steps(3)
    assert not cluster.events("run_paused")
    assert spent(cluster, "paused") == 0.0
    cluster.check()


def test_an_approved_change_that_had_not_begun_is_given_up_for_the_pause() -> None:
    cluster, proposal = waiting()
    assert cluster.approve(proposal).ok
    pause(cluster)
    assert cluster.proposals[proposal.id].state == "failed"
    resume(cluster)
    cluster.run_steps(2)
    assert cluster.shape() == [(), (0, 1, 2)]
    assert cluster.wait_for_proposal(0).id != proposal.id
    cluster.check()


@pytest.mark.parametrize("dies", [(), ("rack-0/1",)])
def test_a_paused_run_can_be_stopped_with_its_checkpoint(dies: tuple[str, ...]) -> None:
    cluster = SimCluster(running(3, 3).config, checkpoints="/c")
    cluster.run_steps(3)
    pause(cluster)
    cluster.kill(*dies)
    cluster.run(1.0)
    cluster.coordinator.finish("stopped", "enough", cluster.now)
    cluster._carry_out(cluster.coordinator.outgoing.take())
    cluster.run_until(lambda: cluster.finish is not None, 10.0, must=False)
    assert cluster.finish is not None
    assert cluster.finish.status == "stopped"
    assert [seal.manifest.applied_step for seal in cluster.seals] == [cluster.committed]
    cluster.check()


def test_a_pause_outlives_the_controller() -> None:
    cluster = running(3, 3)
    pause(cluster, "inspection")
    before = spent(cluster, "paused")
    committed = cluster.committed
    restart_controller(cluster)
    cluster.run(50.0)
    state = cluster.coordinator.snapshot(cluster.now)
    assert (state.status, state.status_reason) == ("paused", "paused by ada: inspection")
    assert spent(cluster, "paused") == pytest.approx(before + 50.0, abs=0.5)
    resume(cluster)
    cluster.run_steps(3)
    assert cluster.committed == committed + 3
    assert [s.step for s in cluster.steps] == list(range(committed + 3))
    cluster.check()
