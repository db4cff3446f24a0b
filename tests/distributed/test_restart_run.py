"""A planned restart with real processes: all are replaced, no step is lost, same line."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest

from storage.commands import Trigger
from tests.support.control_run import run_config, trial

pytestmark = pytest.mark.timeout(120)


def test_asked_for_approved_and_every_process_is_another(tmp_path: Path) -> None:
    with trial(run_config(2, 2), tmp_path) as made:
        pids = set(made.drill.pids().values())
        made.run.submit(
            Trigger(
                id=uuid.uuid4().hex, at=time.time(), who="ada", via="cli", replica=0,
                kind="restart", reason="a library leaks",
            )
        )  # fmt: skip
        made.approve(0)
        assert not pids & set(made.drill.pids().values())
        assert made.shape() == [(0, 1), (0, 1)]
        assert not made.events("gpu_failed")
        made.more_steps(2)
        made.stop()
    made.check()
    steps = [entry.step for entry in made.journal() if hasattr(entry, "grad_norm")]
    assert steps == list(range(len(steps)))
