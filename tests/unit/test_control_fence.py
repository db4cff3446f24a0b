"""Who is stopped for holding the others up, when, and who is not."""

from __future__ import annotations

import pytest

from runtime.config import ControlConfig, PolicyConfig
from runtime.control import messages as m
from runtime.control.fence import OBEYED_S
from tests.support.control_cluster import SimCluster, sim_config
from tests.support.control_cluster import running as running_cluster


def running(*gpus: int, steps: int = 6, **more: object) -> SimCluster:
    """Enough steps for the step time to be known."""
    return running_cluster(*gpus, steps=steps, **more)


def fenced(cluster: SimCluster) -> list[str | None]:
    return [event.gpu for event in cluster.events("rank_fenced")]


@pytest.mark.parametrize("step_s", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("how", ["stop", "jam"])
def test_a_hung_rank_is_stopped_within_three_steps_and_the_others_go_on(
    how: str, step_s: float
) -> None:
    cluster = running(step_s=step_s)
    hung_at = cluster.now
    getattr(cluster, how)("rack-0/1")
    cluster.run_until(lambda: bool(fenced(cluster)))
    deadline_s = max(2.0, 3 * step_s)
    assert cluster.now - hung_at < deadline_s + step_s + 1.0
    cluster.run_steps(3)
    assert fenced(cluster) == ["rack-0/1"]
    assert cluster.shape() == [(), (0, 1, 2)]
    cluster.check()


def test_even_when_there_are_only_two() -> None:
    cluster = running(1, 1)
    cluster.stop("rack-1/0")
    cluster.run_steps(3)
    assert fenced(cluster) == ["rack-1/0"]
    cluster.check()


def test_a_rank_that_hangs_while_the_generation_is_entered() -> None:
    cluster = running(2, 2, 2, control=ControlConfig(step_deadline_s=4.0))
    cluster.kill("rack-0/0")
    cluster.run_until(lambda: cluster.coordinator.phase == "entering")
    cluster.stop("rack-1/1")
    began = cluster.now
    cluster.run_steps(2)
    assert fenced(cluster) == ["rack-1/1"]
    assert cluster.now - began < 8.0
    assert cluster.shape() == [(), (), (0, 1)]
    cluster.check()


def test_a_rank_that_hangs_while_entering_what_the_next_change_is_to_end() -> None:
    policy = PolicyConfig(shrink="auto", grow="auto")
    cluster = running(2, 2, 2, policy=policy, control=ControlConfig(step_deadline_s=4.0))
    cluster.kill("rack-0/0", "rack-0/1")
    cluster.run_until(lambda: cluster.coordinator.phase == "entering")
    cluster.jam("rack-1/0")
    assert cluster.fault("rack-0/0", "repair").ok
    cluster.run_until(lambda: cluster.coordinator.phase == "leaving")
    assert cluster.coordinator.change.planned
    cluster.run_steps(2)
    assert fenced(cluster) == ["rack-1/0"]
    assert not cluster.events("run_stalled")
    cluster.check()


def test_a_rank_that_does_not_leave() -> None:
    cluster = running(2, 2, 2)
    cluster.jam("rack-1/1")
    cluster.kill("rack-0/0")
    began = cluster.now
    cluster.run_steps(1)
    assert fenced(cluster) == ["rack-1/1"]
    assert cluster.now - began < 6.0
    cluster.check()


def test_slow_is_not_hung() -> None:
    cluster = running(step_s=0.5)
    assert cluster.fault("rack-0/1", "slow", 20.0).ok
    cluster.run_steps(3, seconds=60.0)
    assert not fenced(cluster)
    cluster.check()


def test_a_slow_rank_that_is_stopped_is_found_all_the_same() -> None:
    cluster = running(step_s=0.2)
    cluster.fault("rack-0/1", "slow", 20.0)
    cluster.stop("rack-0/1")
    began = cluster.now
    cluster.run_steps(1)
    assert fenced(cluster) == ["rack-0/1"]
    assert cluster.now - began < 6.0
    cluster.check()


def test_steps_longer_than_the_configured_deadline_are_no_reason() -> None:
    config = sim_config(2, 2, step_s=15.0, control=ControlConfig(step_deadline_s=3.0))
    cluster = SimCluster(config)
    cluster.run_steps(4, seconds=100.0)
    cluster.kill("rack-0/1")
    cluster.run_steps(3, seconds=200.0)
    assert not fenced(cluster)
    assert cluster.shape() == [(), (0, 1)]
    cluster.check()


def test_who_waits_for_others_is_left_alone() -> None:
    cluster = running()
    cluster.jam("rack-0/1")
    cluster.run(10.0)
    assert fenced(cluster) == ["rack-0/1"]


def test_a_controller_that_stood_still_blames_nobody() -> None:
    """It was stopped, or the machine slept: pulses lie unread, and no look says otherwise."""
    cluster = running()
    cluster.now += 60.0
    # It looks before it has read what lies there.
    cluster._carry_out(cluster.coordinator.tick(cluster.now))
    cluster.run_steps(3)
    assert not fenced(cluster)
    assert not cluster.events("run_stalled")
    cluster.check()


def test_when_everybody_stands_still_nobody_is_stopped() -> None:
    cluster = running()
    for worker in cluster.workers.values():
        worker.silent = True
    cluster.run(60.0)
    assert not fenced(cluster)
    assert len(cluster.events("run_stalled")) == 1
    assert cluster.finish is None


def test_a_generation_that_nobody_gets_out_of_is_formed_anew() -> None:
    """Everybody waits in a collective, nobody is at fault: a lost message, a cut connection."""
    cluster = running()
    cluster.lose_commit()
    cluster.run_steps(2, seconds=15.0)
    assert not fenced(cluster)
    assert cluster.coordinator.number == 2
    assert "nobody made no progress" not in cluster.events("generation_aborted")[0].message
    cluster.check()


def test_a_rank_that_left_by_itself_takes_the_generation_with_it() -> None:
    cluster = running()
    worker = cluster.workers["rack-0/1"]
    cluster.ranks.park(worker, worker.generation)
    cluster.run_steps(2, seconds=5.0)
    assert not fenced(cluster)
    assert cluster.shape() == [(0, 1, 2), (0, 1, 2)]
    assert "left it by itself" in cluster.events("generation_aborted")[0].message
    cluster.check()


def test_a_rank_that_cannot_be_stopped_is_given_up() -> None:
    """Its agent hangs too: the order to stop it goes unanswered."""
    cluster = running(2, 2, hosts=("a", "b"))
    for gpu in ("rack-0/0", "rack-0/1"):
        cluster.stop(gpu)
    cluster.cut.add("a")
    began = cluster.now
    cluster.run_steps(2)
    assert cluster.now - began < 3.0 + OBEYED_S + 3.0
    assert cluster.shape() == [(), (0, 1)]
    assert "its agent does not stop it" in cluster.events("gpu_failed")[0].message
    cluster.check()


def test_a_planned_change_does_not_wait_for_a_hung_rank_for_ever() -> None:
    cluster = running(2, 2, 2)
    cluster.trigger(0, "drop")
    cluster.jam("rack-1/0")
    cluster.approve(cluster.wait_for_proposal(0))
    cluster.run_steps(2)
    assert fenced(cluster) == ["rack-1/0"]
    assert not [o for o in cluster.ordered(m.KillWorker) if o.gpu != "rack-1/0"]
    cluster.check()
