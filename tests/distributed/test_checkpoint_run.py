"""Checkpoints of a real run while it trains, and a run of another shape that goes on from one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from runtime.config import CheckpointConfig
from runtime.engine.checkpoint import checkpoints_by_age, read_full, read_manifest
from runtime.engine.reference import Reference
from runtime.engine.resume import find_start
from storage.records import LedgerSpent
from tests.support.control_run import run_config, trial

pytestmark = pytest.mark.timeout(120)


def test_written_while_it_trains_pruned_and_equal_to_the_reference(tmp_path: Path) -> None:
    config = msgspec.structs.replace(
        run_config(2, 1, step_s=0.1), checkpoint=CheckpointConfig(every_steps=4, keep=2)
    )
    home = tmp_path / "runs" / "r1"
    home.mkdir(parents=True)
    folder = home / "checkpoint"

    def sealed() -> list[Path]:
        return checkpoints_by_age([*folder.iterdir()]) if folder.exists() else []

    with trial(config, home) as made:
        made.until(lambda: bool(sealed()), "a checkpoint")
        first = sealed()[0]
        made.kill("rack-0/1")
        made.left_out(0)
        made.until(lambda: first not in sealed() and bool(sealed()), "the first to be let go")
        assert not made.run.controller.coordinator.ended
        made.run.controller.ask_stop("at once")
        made.run.controller.ask_stop("at once")
        made.run.join(30.0)
    made.check()
    spans = [e for e in made.journal() if isinstance(e, LedgerSpent)]
    assert any(span.bucket == "checkpointing" for span in spans)
    assert len(sealed()) <= 2
    reference = Reference(config)
    for path in reversed(sealed()):
        manifest = read_manifest(path, verify=True)
        while reference.step_number < manifest.applied_step:
            reference.step()
        _, full = read_full(path, config.model)
        for (name, layer), tensor in reference.params.items():
            assert full[f"{name}.{layer}"].numpy() == pytest.approx(
                tensor.detach().numpy(), abs=2e-4
            )
    start, word = find_start(config, tmp_path / "runs")
    assert start.step == read_manifest(sealed()[0]).applied_step
    assert "continues run" in word
