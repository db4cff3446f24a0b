"""Checkpoints while a run trains, over simulated workers: when, of what, and what failures cost."""

from __future__ import annotations

import msgspec
import pytest

from runtime.config import CheckpointConfig
from runtime.control import messages as m
from tests.support.control_cluster import SimCluster, sim_config
from tests.support.control_restart import restart_controller


def saving(**fields: float) -> SimCluster:
    config = msgspec.structs.replace(
        sim_config(2, 2),
        checkpoint=CheckpointConfig(**fields),  # type: ignore[arg-type]
    )
    return SimCluster(config, checkpoints="/ckpt")


def parts_told(cluster: SimCluster) -> int:
    pending = cluster.coordinator.checkpoints._pending
    return len(pending.parts) if pending is not None else 0


def test_off_unless_asked_for() -> None:
    cluster = saving()
    cluster.run_steps(10)
    assert not cluster.seals
    cluster.check()


def test_at_multiples_of_steps_with_a_part_of_every_rank() -> None:
    cluster = saving(every_steps=5)
    cluster.run_steps(22)
    steps = [seal.manifest.applied_step for seal in cluster.seals]
    assert len(steps) >= 2
    assert all(step % 5 == 0 for step in steps)
    assert all(len(seal.manifest.parts) == 4 for seal in cluster.seals)
    assert len({seal.folder for seal in cluster.seals}) == len(steps)
    cluster.check()


def test_by_the_clock_and_the_copy_is_in_the_ledger() -> None:
    cluster = saving(every_s=3.0)
    cluster.run_steps(12)
    assert cluster.seals
    totals = cluster.coordinator.progress.ledger.totals(cluster.now)
    assert totals["checkpointing"] == pytest.approx(0.002 * len(cluster.seals), abs=0.0021)
    cluster.check()


def test_a_rank_that_dies_before_its_part_is_written_costs_that_checkpoint_only() -> None:
    cluster = saving(every_steps=5)
    cluster.run_until(lambda: any(w.wanted and w.wanted.step == w.applied
                                  for w in cluster.workers.values()))  # fmt: skip
    cluster.kill("rack-0/1")
    cluster.run(3.0)
    assert not [seal for seal in cluster.seals if seal.manifest.applied_step == 5]
    assert "failed before its part" in cluster.events("checkpoint_failed")[0].message
    cluster.run_steps(15)
    assert cluster.seals
    cluster.check()


def test_a_checkpoint_whose_step_the_generation_never_reached_is_ordered_anew() -> None:
    cluster = saving(every_steps=20)
    cluster.run_steps(3)
    cluster.kill("rack-0/1")
    cluster.run_until(lambda: bool(cluster.seals), 120.0)
    assert cluster.seals[0].manifest.applied_step == 20
    assert not cluster.events("checkpoint_failed")
    cluster.check()


def test_a_stop_while_parts_are_written_still_leaves_the_last_one() -> None:
    cluster = saving(every_steps=5)
    cluster.run_until(lambda: any(w.wanted and w.wanted.step == w.applied
                                  for w in cluster.workers.values()))  # fmt: skip
    cluster.coordinator.finish("stopped", "enough", cluster.now)
    cluster._carry_out(cluster.coordinator.outgoing.take())
    cluster.run_until(lambda: cluster.finish is not None)
    assert cluster.seals[-1].manifest.applied_step == cluster.committed
    cluster.check()


def test_a_restarted_controller_goes_on_with_the_checkpoint_under_way() -> None:
    cluster = saving(every_steps=5)
    cluster.run_until(lambda: bool(cluster.ordered(m.Save)))
    step = cluster.ordered(m.Save)[0].step
    # Ordered, not reached yet.
    restart_controller(cluster)
    # One part was told to a controller that is gone: its rank tells it again.
    cluster.run_until(lambda: bool(parts_told(cluster)))
    assert not cluster.seals
    restart_controller(cluster)
    cluster.run_until(lambda: bool(cluster.seals), 2.0)
    assert cluster.seals[0].manifest.applied_step == step
    assert len(cluster.seals[0].manifest.parts) == 4
    assert not cluster.events("checkpoint_failed")
    cluster.run_until(lambda: len(cluster.seals) > 1)
    assert cluster.seals[1].manifest.applied_step == step + 5
    cluster.check()


def test_an_agent_that_comes_back_while_parts_are_written_costs_no_checkpoint() -> None:
    cluster = saving(every_steps=5)
    cluster.run_until(lambda: any(w.saved for w in cluster.workers.values()))
    cluster.disconnect("localhost")
    cluster.run(0.5)
    cluster.reconnect("localhost")
    cluster.run_until(lambda: bool(cluster.seals), 5.0)
    assert not cluster.events("checkpoint_failed")
    cluster.check()


@pytest.mark.parametrize("at_the_end", [False, True])
def test_what_takes_longer_than_the_config_allows_is_given_up(at_the_end: bool) -> None:
    cluster = saving(every_steps=5, write_deadline_s=30.0)
    cluster.ranks.write_s = 25.0 if at_the_end else 1_000.0
    if at_the_end:
        cluster.run_steps(3)
        cluster.coordinator.finish("stopped", "enough", cluster.now)
        cluster._carry_out(cluster.coordinator.outgoing.take())
        cluster.run_until(lambda: cluster.finish is not None)
        assert cluster.seals[-1].manifest.applied_step == cluster.committed
        assert not cluster.events("checkpoint_failed")
    else:
        cluster.run_until(lambda: bool(cluster.events("checkpoint_failed")), 120.0)
        (event,) = cluster.events("checkpoint_failed")
        assert "not every rank wrote its part within 30 s" in event.message
    cluster.check()
