"""Pause and resume with real worker processes: nobody is replaced, the trajectory is the same."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest

from storage.commands import Pause, Resume
from tests.support.control_run import Trial, run_config, trial

pytestmark = pytest.mark.timeout(120)


def ask(made: Trial, kind: type[Pause | Resume]) -> None:
    made.run.submit(kind(id=uuid.uuid4().hex, at=time.time(), who="ada", via="cli"))


def test_pause_lose_a_gpu_resume_and_the_loss_curve_is_the_undisturbed_one(tmp_path: Path) -> None:
    with trial(run_config(2, 2), tmp_path) as made:
        pids = made.drill.pids()
        ask(made, Pause)
        made.until(lambda: made.coordinator.phase == "paused", "the pause")
        committed = made.coordinator.progress.committed
        made.kill("rack-0/1")
        made.until(lambda: bool(made.events("gpu_failed")), "news of the failure")
        assert made.coordinator.phase == "paused"
        assert made.coordinator.progress.committed == committed
        ask(made, Resume)
        made.left_out(0)
        made.more_steps(2)
        made.approve(0)
        assert made.shape() == [(0,), (0, 1)]
        made.more_steps(2)
        now = made.drill.pids()
        assert {gpu for gpu in pids if pids[gpu] != now.get(gpu)} == {"rack-0/1"}
        assert made.coordinator.progress.ledger.totals(time.time())["paused"] > 0.0
        made.stop()
    made.check()
