"""Units shared by sample in a run's plans: through failures, a take-over and the way home."""

from __future__ import annotations

import msgspec
import pytest

from runtime.control.situations import situation_of
from runtime.layout.move import move_plan
from runtime.layout.units import STORED_FAMILIES, num_units, rota
from runtime.plan.generation import GenerationPlan
from storage.holdings import at_home
from tests.support.control_cluster import SimCluster, sim_config
from tests.support.control_restart import restart_controller


def shared_cluster() -> SimCluster:
    """Two racks of 4; over 3 slots neither 8 heads nor 8 blocks divide evenly."""
    config = sim_config(4, 4)
    train = msgspec.structs.replace(config.train, fractional="on")
    return SimCluster(msgspec.structs.replace(config, train=train))


def plan_of(cluster: SimCluster) -> GenerationPlan:
    assert cluster.coordinator.plan is not None
    return cluster.coordinator.plan


def test_shared_units_in_a_runs_plans_are_those_that_were_predicted() -> None:
    cluster = shared_cluster()
    cluster.run_steps(4)
    cluster.kill("rack-0/1")
    proposal = cluster.wait_for_proposal(0)
    coordinator = cluster.coordinator
    situation = situation_of(coordinator, coordinator.desk.followup)
    predicted = situation.layout(situation.replicas[0], (0, 2, 3))
    assert cluster.approve(proposal).ok
    cluster.run_steps(14)
    replica = plan_of(cluster).replicas[0]
    assert replica.holders == predicted
    moved = move_plan(cluster.config.model, plan_of(cluster)).num_bytes(cluster.config.model)
    assert moved > 0
    assert cluster.coordinator.snapshot(cluster.now).moved_bytes == moved
    assert f"moves {moved / 1e6:.2f} MB" in cluster.events("state_moved")[0].message
    assert {f: len(rota(replica.holders, f)) for f in STORED_FAMILIES} == {
        "attention": 3, "mlp": 3, "vocab": 1,
    }  # fmt: skip
    done = cluster.proposals[proposal.id]
    assert done.outcome is not None
    assert done.outcome.step_s == pytest.approx(done.options[proposal.recommended].step_s, rel=0.05)
    # A sharer dies, a third slot is lost, all come home.
    cluster.kill("rack-0/2")
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_steps(4)
    assert cluster.shape() == [(0, 3), (0, 1, 2, 3)]
    for gpu in ("rack-0/1", "rack-0/2"):
        cluster.fault(gpu, "repair")
    cluster.run_until(lambda: (p := cluster.open_for(0)) is not None and p.kind == "grow")
    cluster.run(2.0)
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_steps(4)
    assert cluster.shape() == [(0, 1, 2, 3), (0, 1, 2, 3)]
    home = plan_of(cluster).replicas
    assert home[0].holders == home[1].holders
    cluster.check()


def test_units_on_show_are_those_of_the_stored_families() -> None:
    cluster = shared_cluster()
    cluster.run_steps(4)
    cluster.kill("rack-0/1")
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_steps(4)
    model = cluster.config.model
    units = cluster.coordinator.snapshot(cluster.now).replicas[0].units
    assert {family: sum(counts) for family, counts in units.items()} == {
        family: num_units(model, family) for family in STORED_FAMILIES
    }


def test_which_units_a_slot_holds_is_told_where_it_is_not_the_home_layout() -> None:
    cluster = shared_cluster()
    cluster.run_steps(4)
    first = cluster.coordinator.snapshot(cluster.now).replicas[0]
    assert first.holdings is None
    assert at_home(first.units).alone["attention"] == (
        ((0, 1),), ((2, 3),), ((4, 5),), ((6, 7),),
    )  # fmt: skip
    cluster.kill("rack-0/1")
    cluster.wait_for_proposal(0)
    standby = cluster.coordinator.snapshot(cluster.now).replicas[0].holdings
    assert standby is not None
    assert standby.alone["attention"] == (((0, 1),), (), ((4, 5),), ((6, 7),))
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_steps(4)
    holdings = cluster.coordinator.snapshot(cluster.now).replicas[0].holdings
    assert holdings is not None
    for family, count in (("attention", 8), ("mlp", 8)):
        alone = [u for runs in holdings.alone[family] for a, b in runs for u in range(a, b + 1)]
        shared = [one.unit for one in holdings.shared[family]]
        assert sorted(alone + shared) == list(range(count))
        holders = plan_of(cluster).replicas[0].holders
        for one in holdings.shared[family]:
            assert one.turns == tuple(turn[one.unit] for turn in rota(holders, family))
            assert len(set(one.turns)) > 1


def test_a_controller_that_takes_over_goes_on_with_shared_units() -> None:
    cluster = shared_cluster()
    cluster.run_steps(4)
    cluster.kill("rack-0/1")
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_steps(4)
    before = plan_of(cluster), cluster.coordinator.snapshot(cluster.now)
    restart_controller(cluster)
    cluster.run_steps(2)
    after = cluster.coordinator.snapshot(cluster.now)
    assert plan_of(cluster) == before[0]
    assert after.replicas[0].holdings == before[1].replicas[0].holdings
    assert after.moved_bytes == before[1].moved_bytes
    cluster.kill("rack-0/2")
    assert cluster.approve(cluster.wait_for_proposal(0)).ok
    cluster.run_steps(3)
    assert cluster.shape() == [(0, 3), (0, 1, 2, 3)]
    cluster.check()
