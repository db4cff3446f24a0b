"""Real runs whose numbers go wrong: a silent bit flip, steps that are not finite."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import msgspec
import pytest

from runtime.config import Config
from runtime.control.local import LocalRun
from runtime.engine.checkpoint import checkpoints_by_age, read_manifest
from storage.commands import Fault
from storage.records import EventHappened, RunEnded, StepCommitted
from tests.support.control_run import Trial, run_config, trial

pytestmark = pytest.mark.timeout(120)


def corrupt(made: Trial, gpu: str) -> None:
    made.run.submit(
        Fault(id=uuid.uuid4().hex, at=time.time(), who="ada", via="cli", gpu=gpu, kind="corrupt")
    )


def test_a_flipped_bit_is_found_and_the_odd_one_fetches_its_state_anew(tmp_path: Path) -> None:
    with trial(run_config(2, 2, 1, step_s=0.1), tmp_path) as made:
        pids = made.drill.pids()
        corrupt(made, "rack-1/0")
        made.until(lambda: bool(made.events("gpu_recovered")), "the state to be fetched anew")
        (event,) = made.events("states_differ")
        assert event.gpu == "rack-1/0"
        assert event.details["odd"] == ["rack-1/0"]
        assert event.details["units"]
        formed = len(made.events("states_differ"))
        made.more_steps(12)
        assert len(made.events("states_differ")) == formed, "compared twice since: all agree"
        assert made.drill.pids() == pids, "nobody was restarted"
        assert made.shape() == [(0, 1), (0, 1), (0,)]
        made.stop()


def diverging(**train: object) -> Config:
    """A learning rate at which the first update ends all: the second step is not finite."""
    config = run_config(2, 1, step_s=0.02)
    train = {"lr": 1e30, "warmup_steps": 0, **train}
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, **train))


def ended(config: Config, home: Path) -> tuple[list[object], RunEnded]:
    with LocalRun(config, home=home, store=None) as run:
        run.join(60.0)
        made = Trial(run, config, home)
    journal = made.journal()
    assert isinstance(journal[-1], RunEnded)
    return list(journal), journal[-1]


def test_steps_that_stay_not_finite_end_the_run_after_the_limit(tmp_path: Path) -> None:
    journal, end = ended(diverging(max_skipped=2), tmp_path)
    assert end.status == "failed"
    assert "3 steps in a row are not finite (train.max_skipped is 2)" in end.reason
    steps = [entry for entry in journal if isinstance(entry, StepCommitted)]
    assert [step.step for step in steps] == list(range(len(steps)))
    assert [step.tokens > 0 for step in steps[:4]] == [True, False, False, False]
    told = [e for e in journal if isinstance(e, EventHappened) and e.kind == "step_skipped"]
    assert len(told) == len(steps) - 1
    assert told[0].details["step"] == 1
    (newest, *_) = checkpoints_by_age([*(tmp_path / "checkpoint").iterdir()])
    assert read_manifest(newest, verify=True).applied_step == len(steps)


def test_stop_leaves_a_checkpoint_of_before(tmp_path: Path) -> None:
    journal, end = ended(diverging(non_finite="stop"), tmp_path)
    assert end.status == "failed"
    assert "step 1 is not finite, twice: first the" in end.reason
    assert [e.step for e in journal if isinstance(e, StepCommitted)] == [0]
    (newest, *_) = checkpoints_by_age([*(tmp_path / "checkpoint").iterdir()])
    assert read_manifest(newest, verify=True).applied_step == 1
