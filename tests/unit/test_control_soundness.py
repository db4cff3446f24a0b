"""What becomes of steps that are not finite, and of holders that differ, in simulated time."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from runtime.control import messages as m
from runtime.control.progress import Progress
from runtime.plan.generation import NOT_FINITE
from storage.history.incidents import incidents_of
from storage.records import EventHappened
from tests.support.control_cluster import SimCluster, running, sim_config

BATCH = 12


def not_finite(*gpus: str, again: bool = True) -> dict[str, Any]:
    seen = m.NotFiniteSeen(gpus=gpus, where="the MLP of layer 0", again=again)
    if not again:
        return {"not_finite": seen}
    return {"loss": None, "grad_norm": NOT_FINITE, "tokens": 0, "not_finite": seen}


def test_a_skipped_step_is_told_with_place_and_samples_and_counts_no_token() -> None:
    cluster = running(3, 3)
    step = cluster.committed + 1
    cluster.ranks.said[step] = not_finite("rack-1/2")
    cluster.run_until(lambda: cluster.committed > step + 2)
    (event,) = cluster.events("step_skipped")
    assert (event.severity, event.gpu, event.replica) == ("critical", "rack-1/2", 1)
    assert "first the MLP of layer 0 on rack-1/2" in event.message
    assert event.details["step"] == step
    assert event.details["samples"] == {"1": [step * BATCH + 6, (step + 1) * BATCH]}
    skipped = next(each for each in cluster.steps if each.step == step)
    assert math.isnan(skipped.loss)
    assert math.isnan(skipped.grad_norm)
    assert skipped.tokens == 0
    (incident,) = incidents_of(cluster.formed, _events(cluster), [], [], cluster.now)
    assert incident.gpus == ("rack-1/2",)
    assert incident.end is not None, "over with the next step that is finite"
    assert len(cluster.formed) == 1, "nobody left for it"
    cluster.check()


def test_its_time_is_lost() -> None:
    cluster = running(3, 3, step_s=1.0)
    ledger = cluster.coordinator.progress.ledger
    before = ledger.totals(cluster.now)["degraded"]
    cluster.ranks.said[cluster.committed + 1] = not_finite("rack-1/2")
    cluster.run_steps(3)
    assert ledger.totals(cluster.now)["degraded"] - before == pytest.approx(1.0, abs=0.1)


def test_too_many_in_a_row_end_the_run_with_a_checkpoint(tmp_path: Any) -> None:
    config = sim_config(3, 3)
    cluster = SimCluster(config, checkpoints=str(tmp_path))
    cluster.run_steps(3)
    first = cluster.committed + 1
    # Two are forgiven by a good one between them.
    for step in (first, first + 1, *range(first + 3, first + 20)):
        cluster.ranks.said[step] = not_finite("rack-0/0")
    cluster.run_until(lambda: cluster.finish is not None)
    assert cluster.finish is not None
    assert cluster.finish.status == "failed"
    assert "4 steps in a row are not finite (train.max_skipped is 3)" in cluster.finish.reason
    assert cluster.committed in (first + 7, first + 8), "at the boundary after the fourth"
    assert cluster.seals
    cluster.check()


def test_the_count_goes_on_after_a_restart_of_the_controller() -> None:
    cluster = running(3, 3)
    first = cluster.committed + 1
    for step in (first, first + 1):
        cluster.ranks.said[step] = not_finite("rack-0/0")
    cluster.run_until(lambda: cluster.committed == first + 2)
    progress = Progress(
        cluster.config, run="sim", now=cluster.now, outgoing=cluster.coordinator.outgoing
    )
    for entry in cluster.entries:
        progress.replay(entry)
    assert progress.num_skipped == 2
    assert progress.last is not None
    assert (progress.last.loss, progress.last.grad_norm) == (None, NOT_FINITE)


def test_a_fault_that_passed_is_a_warning() -> None:
    cluster = running(3, 3)
    cluster.ranks.said[cluster.committed + 1] = not_finite("rack-0/1", again=False)
    cluster.run_steps(3)
    (event,) = cluster.events("step_run_again")
    assert event.severity == "warning"
    assert not cluster.events("step_skipped")
    cluster.check()


def test_stop_ends_the_run_before_the_step(tmp_path: Any) -> None:
    cluster = SimCluster(sim_config(3, 3), checkpoints=str(tmp_path))
    cluster.run_steps(3)
    step = cluster.committed
    seen = m.NotFiniteSeen(gpus=("rack-1/0",), where="the loss", again=True)
    for gpu, worker in cluster.workers.items():
        refused = m.StepRefused(gpu=gpu, generation=1, step=step, seen=seen)
        cluster.from_agent(gpu, refused)
        cluster.ranks.park(worker, 1)
    cluster.run_until(lambda: cluster.finish is not None)
    assert cluster.finish is not None
    assert cluster.finish.status == "failed"
    assert f"step {step} is not finite, twice: first the loss on rack-1/0" in cluster.finish.reason
    assert 'train.non_finite = "skip"' in cluster.finish.reason
    assert len(cluster.events("step_not_finite")) == 1
    assert cluster.committed == step
    (seal,) = cluster.seals
    assert seal.manifest.applied_step == step


def test_the_odd_one_fetches_its_state_anew() -> None:
    cluster = running(3, 3, 3)
    differ = m.StatesDiffer(units=("MLP block 3",), odd=("rack-1/2",), unsure=())
    step = cluster.committed + 1
    cluster.ranks.said[step] = {"difference": differ}
    cluster.run_until(lambda: len(cluster.formed) == 2)
    (event,) = cluster.events("states_differ")
    assert (event.severity, event.gpu) == ("critical", "rack-1/2")
    assert f"holders differ in MLP block 3 after step {step}: rack-1/2" in event.message
    plan = cluster.coordinator.plan
    assert plan is not None
    assert plan.planned
    brings = {gpu for source in plan.sources for gpu in source.gpus}
    assert set(plan.members()) - brings == {"rack-1/2"}
    (incident,) = incidents_of(cluster.formed, _events(cluster), [], [], cluster.now)
    assert incident.end is not None
    assert incident.verified == "rack-1/2 has fetched its state anew from the others"
    cluster.run_steps(3)
    assert len(cluster.formed) == 2
    cluster.check()


@pytest.mark.parametrize(
    "differ",
    [
        m.StatesDiffer(units=("the norms",), odd=(), unsure=("rack-0/0", "rack-1/0")),
        m.StatesDiffer(units=("the norms",), odd=("rack-0/0",), unsure=("rack-0/1", "rack-1/0")),
    ],
)
def test_without_a_majority_a_person_must_say(differ: m.StatesDiffer) -> None:
    cluster = running(3, 3)
    cluster.ranks.said[cluster.committed + 1] = {"difference": differ}
    cluster.run_steps(4)
    (event,) = cluster.events("states_differ")
    assert "no majority says who is right. End the worker of the one you distrust" in event.message
    assert len(cluster.formed) == 1


def test_who_alone_holds_something_keeps_it() -> None:
    """Nobody could give it back: its own state is the only one."""
    cluster = running(3)
    differ = m.StatesDiffer(units=("key/value head 1",), odd=("rack-0/2",), unsure=())
    cluster.ranks.said[cluster.committed + 1] = {"difference": differ}
    cluster.run_steps(4)
    assert "no majority" in cluster.events("states_differ")[0].message
    assert len(cluster.formed) == 1


def test_a_second_failure_on_the_way_does_not_lose_the_state() -> None:
    """The odd one's state is better than none."""
    cluster = running(3, 3)
    plan = cluster.coordinator.plan
    assert plan is not None
    cluster.coordinator.generations.distrust(["rack-0/1"])
    cluster.kill("rack-1/0", "rack-1/1", "rack-1/2")
    cluster.run_until(lambda: len(cluster.formed) == 2)
    assert cluster.finish is None
    cluster.run_steps(2)


def _events(cluster: SimCluster) -> list[EventHappened]:
    """With the numbers that the journal would have given them."""
    found = [each for each in cluster.entries if isinstance(each, EventHappened)]
    return [msgspec.structs.replace(each, seq=seq) for seq, each in enumerate(found)]
