"""The simulators: accounts add up, policies rank as they must, the paper's figures come out."""

from __future__ import annotations

import pytest

from runtime.bench import cluster
from runtime.config import ClusterConfig, Config, RackConfig
from runtime.plan.simulate import ChangeCosts, Outage, SimulatedPolicy, fault_trace, simulate
from runtime.plan.simulate_cluster import ClusterSetting, failed_per_domain

CONFIG = Config(
    cluster=ClusterConfig(racks=tuple(RackConfig(name=f"rack-{i}", gpus=4) for i in range(2)))
)
COSTS = ChangeCosts(detect_s=0.1, forced_s=0.2, planned_s=0.2)
ONE = (Outage(10.5, 40.5, 1, 2),)


@pytest.mark.parametrize("policy", ["boost", "shrink", "drop", "restart", "torchft"])
def test_buckets_add_up_to_the_wall_time(policy: SimulatedPolicy) -> None:
    trace = fault_trace(CONFIG, seconds=120, every_s=20, repair_s=40, seed=3)
    result = simulate(CONFIG, trace, policy, COSTS, seconds=120)
    assert sum(result.buckets.values()) == pytest.approx(120, abs=1)
    assert 0 < result.goodput < 1


def test_without_a_fault_every_policy_is_ideal() -> None:
    assert simulate(CONFIG, (), "drop", COSTS, seconds=60).goodput == pytest.approx(1.0)


def test_boost_beats_shrinking_beats_dropping() -> None:
    boost, shrink, drop = (
        simulate(CONFIG, ONE, policy, COSTS, seconds=60).goodput
        for policy in ("boost", "shrink", "drop")
    )
    assert boost > shrink > drop


def test_a_restart_redoes_what_is_since_the_checkpoint() -> None:
    costs = ChangeCosts(detect_s=0.1, forced_s=2.0, planned_s=2.0, checkpoint_every=7)
    result = simulate(CONFIG, ONE, "restart", costs, seconds=60)
    # Ten steps are done at the failure: three since the checkpoint, and the step at hand.
    assert result.buckets["recomputing"] >= 0.5 + 3 * 1.0


def test_torchft_loses_tokens_of_the_replica_not_its_pace() -> None:
    result = simulate(CONFIG, ONE, "torchft", ChangeCosts(), seconds=60)
    assert result.goodput == pytest.approx(1 - 30 / 60 / 2, abs=0.03)


def test_nothing_trains_while_no_replica_is_whole() -> None:
    both = (Outage(10.0, 30.0, 0, 0), Outage(12.0, 30.0, 1, 0))
    result = simulate(CONFIG, both, "drop", ChangeCosts(), seconds=60)
    assert result.buckets["paused"] == pytest.approx(18, abs=1)
    assert simulate(CONFIG, both, "shrink", ChangeCosts(), seconds=60).buckets["paused"] == 0


def test_failed_gpus_are_as_many_as_asked_for_and_in_blocks() -> None:
    setting = ClusterSetting()
    failed = failed_per_domain(setting, 0.004, 5, seed=1, at_once=4)
    assert (failed.sum(1) == round(0.004 * setting.num_gpus / 4) * 4).all()
    assert (failed % 4 == 0).all()


def test_cluster_figures_are_those_of_the_paper() -> None:
    figures = cluster.measure(lambda _: None)
    missed = [t.figure for t in cluster.targets(figures) if not t.is_reached(figures)]
    assert not missed
    assert figures["step_tp30_whole_heads"] == pytest.approx(1.136, abs=0.002)
    assert figures["spares_drop"] == pytest.approx(90, abs=6)
