"""Real workers lose the state everywhere: back to a checkpoint, and the trajectory is the same."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from runtime.config import CheckpointConfig, Config
from runtime.engine.checkpoint import MANIFEST, checkpoints_by_age
from storage.records import RunRolledBack
from tests.support.control_run import DEADLINE_S, Trial, run_config, trial

pytestmark = pytest.mark.timeout(180)


def saving(*gpus: int) -> Config:
    checkpoint = CheckpointConfig(every_steps=4, keep=2)
    return msgspec.structs.replace(run_config(*gpus), checkpoint=checkpoint)


def sealed(home: Path) -> list[Path]:
    folder = home / "checkpoint"
    return checkpoints_by_age([*folder.iterdir()]) if folder.exists() else []


def rolled_back(made: Trial) -> list[RunRolledBack]:
    return [entry for entry in made.drill.entries if isinstance(entry, RunRolledBack)]


def go_past(made: Trial, step: int) -> None:
    """Wait until `step` is committed, once more if it was before."""
    made.until(lambda: made.coordinator.progress.committed > step, f"step {step}", 2 * DEADLINE_S)


def test_holders_die_one_replica_after_the_other_and_the_rest_goes_on(tmp_path: Path) -> None:
    with trial(saving(2, 2), tmp_path) as made:
        made.until(lambda: bool(sealed(tmp_path)), "a checkpoint")
        made.kill("rack-0/1")
        made.left_out(0)
        made.kill("rack-1/0", "rack-1/1")
        made.until(lambda: bool(rolled_back(made)), "the fall back")
        (back,) = rolled_back(made)
        assert 0 < back.step <= back.committed
        go_past(made, back.committed + 1)
        assert made.shape() == [(0,), ()]
        for gpu in ("rack-1/0", "rack-1/1"):
            made.repair(gpu)
        made.until(lambda: made.coordinator.fleet.alive(1) == (0, 1), "replica 1")
        made.approve(1)
        made.more_steps(2)
        assert made.shape() == [(0,), (0, 1)]
        made.stop()
    made.check()


def test_all_die_the_newest_checkpoint_is_damaged_and_the_one_before_is_taken(
    tmp_path: Path,
) -> None:
    with trial(saving(2, 1), tmp_path) as made:
        made.until(lambda: len(sealed(tmp_path)) >= 2, "two checkpoints")
        damaged = sealed(tmp_path)[0]
        for part in damaged.iterdir():
            if part.name != MANIFEST:
                part.write_bytes(part.read_bytes()[:-1])
        made.kill("rack-0/0", "rack-0/1", "rack-1/0")
        made.until(lambda: bool(rolled_back(made)), "the fall back")
        (back,) = rolled_back(made)
        assert Path(back.checkpoint) != damaged
        for gpu in ("rack-0/0", "rack-0/1"):
            made.repair(gpu)
        go_past(made, back.committed + 1)
        assert made.shape()[1] == ()
        made.stop()
    made.check()
