"""Units shared by sample in whole runs: failures, checkpoints on the way, and the way home."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from runtime.config import CheckpointConfig, Config
from runtime.engine.checkpoint import checkpoints_by_age, read_manifest
from runtime.engine.resume import find_start
from runtime.layout.units import STORED_FAMILIES, rota
from tests.support.control_run import Trial, run_config, trial

pytestmark = pytest.mark.timeout(120)


def shared_config(*gpus: int) -> Config:
    """Neither 8 heads nor 7 blocks divide by 3 slots."""
    config = run_config(*gpus)
    return msgspec.structs.replace(
        config,
        train=msgspec.structs.replace(config.train, fractional="on"),
        checkpoint=CheckpointConfig(every_steps=4, keep=1),
    )


def turns(made: Trial, replica: int) -> int:
    holders = made.coordinator.plan.replicas[replica].holders
    return max(len(rota(holders, family)) for family in STORED_FAMILIES)


def lose(made: Trial, gpu: str) -> None:
    made.kill(gpu)
    made.left_out(0)
    made.more_steps(2)
    made.approve(0)
    made.more_steps(2)


def test_through_kills_and_home_again_then_on_in_another_shape(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    def checkpoint_step() -> int:
        sealed = checkpoints_by_age([*runs.glob("*/checkpoint/step-*")])
        return read_manifest(sealed[0]).applied_step if sealed else 0

    with trial(shared_config(4, 4), made_folder(runs / "r1"), run="r1") as made:
        lose(made, "rack-0/1")
        assert (made.shape(), turns(made, 0)) == ([(0, 2, 3), (0, 1, 2, 3)], 3)
        shared_from = made.drill.commits[-1].step
        made.until(lambda: checkpoint_step() > shared_from, "a checkpoint of shared units")
        lose(made, "rack-0/2")
        assert made.shape() == [(0, 3), (0, 1, 2, 3)]
        for gpu in ("rack-0/1", "rack-0/2"):
            made.repair(gpu)
        made.until(
            lambda: (
                (p := made.open_for(0)) is not None
                and p.options[p.recommended].shape[0] == (0, 1, 2, 3)
            ),
            "a proposal to grow home",
        )
        made.approve(0)
        assert (made.shape(), turns(made, 0)) == ([(0, 1, 2, 3), (0, 1, 2, 3)], 1)
        lose(made, "rack-0/0")
        assert turns(made, 0) == 3
        made.stop()
    made.check()
    # What slots that shared units wrote last, slots of other racks read.
    config = shared_config(3, 2)
    begin = find_start(config, runs)
    assert begin[0].step == made.drill.commits[-1].step + 1
    with trial(config, made_folder(runs / "r2"), run="r2", begin=begin) as made:
        lose(made, "rack-0/1")
        made.stop()
    made.check()


def made_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path
