"""Checkpoints on disk: a crash at any moment, damage, and how many are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from runtime.cli import cli
from runtime.config import CheckpointConfig, Config, ModelConfig
from runtime.engine import checkpoint
from runtime.engine.checkpoint import (
    CheckpointError,
    PartCopy,
    checkpoints_by_age,
    copy_part,
    prune,
    seal,
    set_aside,
)
from runtime.engine.resume import find_start
from runtime.engine.state import State, StateLayout
from runtime.errors import UserError
from runtime.layout.takeover import home_holders
from runtime.layout.units import held_units
from runtime.plan.manifest import Manifest, Part, Start

MODEL = ModelConfig(num_layers=1, hidden=16, num_query_heads=8, num_kv_heads=2, head_dim=4)
CONFIG = Config(model=MODEL)


def part_copy() -> PartCopy:
    held = held_units(MODEL, home_holders(MODEL, 1), 0)
    state = State(
        StateLayout(MODEL, held), applied_step=0, device=torch.device("cpu"), dtype=torch.float32
    )
    state.initialise(MODEL, 0)
    return copy_part(state, held)


@pytest.fixture
def copy() -> PartCopy:
    return part_copy()


def manifest_of(step: int, *parts: Part, origin: str = "") -> Manifest:
    return Manifest(
        run="r1",
        applied_step=step,
        model=MODEL,
        train=CONFIG.train,
        parts=parts,
        origin=origin,
    )


def write(runs: Path, step: int, copy: PartCopy, keep: int = 2, origin: str = "") -> Path:
    folder = runs / "r1" / "checkpoint" / f"step-{step:08d}-generation-1"
    part = checkpoint.write_part(folder, "rack-0/0", copy)
    seal(folder, manifest_of(step, part, origin=origin))
    prune(folder, keep)
    return folder


@pytest.mark.parametrize("keep", [1, 2])
def test_a_writer_killed_at_any_moment_leaves_a_checkpoint(tmp_path: Path, keep: int) -> None:
    """Every call that reaches the disk is a moment; the last writer has none left to die at."""
    writers = subprocess.run(
        [sys.executable, "-m", "tests.support.killed_writer", str(tmp_path), str(keep)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    told = [json.loads(line) for line in writers.stdout.splitlines()]
    assert [one["killed"] for one in told] == [True] * (len(told) - 1) + [False]
    assert len(told) > 12
    steps = [one["step"] for one in told]
    # What was there before, then what was being written: once it is whole, it stays.
    assert steps == sorted(steps)
    assert (set(steps[:-1]), steps[-1]) == ({10, 20}, 20)
    # What a killed one left does not stand in the way of the next.
    assert {one["next_step"] for one in told} == {30}


def test_a_damaged_one_is_passed_over_for_the_next_older_and_said_so(
    tmp_path: Path, copy: PartCopy
) -> None:
    write(tmp_path, 10, copy, 3)
    middle, newest = write(tmp_path, 20, copy, 3), write(tmp_path, 30, copy, 3)
    part = next(newest.glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    (middle / checkpoint.MANIFEST).write_text("{")
    begin = find_start(CONFIG, tmp_path)
    assert begin.start.step == 10
    assert begin.word == "continues run r1 at step 10"
    assert "checksum differs" in begin.damaged
    # They never come again, are named, and stay where a person can look at them.
    for folder in (middle, newest):
        aside = folder.with_name(f"damaged-{folder.name}")
        assert str(aside) in begin.damaged
        assert aside.is_dir()
        assert not folder.exists()
    assert find_start(CONFIG, tmp_path).damaged == ""
    assert set_aside(write(tmp_path, 30, copy, 3)) == newest.with_name(f"damaged-{newest.name}-2")


def test_a_cursor_that_does_not_fit_the_step_is_damage(tmp_path: Path, copy: PartCopy) -> None:
    write(tmp_path, 10, copy, 3)
    manifest = write(tmp_path, 20, copy, 3) / checkpoint.MANIFEST
    manifest.write_text(manifest.read_text().replace('"next_sample": 0', '"next_sample": 321'))
    begin = find_start(CONFIG, tmp_path)
    assert begin.start.step == 10
    assert "the next sample is 321, but 20 steps have taken 320" in begin.damaged


def test_what_may_become_readable_again_stays_in_its_place(tmp_path: Path, copy: PartCopy) -> None:
    write(tmp_path, 10, copy, 3)
    later = write(tmp_path, 20, copy, 3)
    manifest = later / checkpoint.MANIFEST
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    begin = find_start(CONFIG, tmp_path)
    assert (begin.start.step, later.exists()) == (10, True)
    assert "format 2" in begin.damaged


def test_a_run_begins_where_its_configuration_says(tmp_path: Path, copy: PartCopy) -> None:
    given = write(tmp_path / "elsewhere", 40, copy)
    config = with_start(CONFIG, str(given))
    runs = tmp_path / "runs"
    start, word, _ = find_start(config, runs)
    assert (start.checkpoint, start.step) == (str(given), 40)
    assert f"begins at step 40 of {given}" in word
    # One's own of the same beginnings comes first, one of other beginnings does not count.
    write(runs, 50, copy)
    assert find_start(config, runs)[0].step == 40
    assert "other settings (checkpoint.start)" in find_start(config, runs)[1]
    write(runs, 60, copy, origin=str(given))
    assert find_start(config, runs)[0].step == 60
    assert find_start(config, runs, fresh=True)[0].step == 40
    assert find_start(CONFIG, runs)[0] == Start()


def test_a_beginning_that_cannot_be_is_refused(
    tmp_path: Path, copy: PartCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = write(tmp_path, 40, copy)
    other = msgspec.structs.replace(MODEL, hidden=32)
    with pytest.raises(UserError, match="hidden is 16, not 32"):
        find_start(msgspec.structs.replace(with_start(CONFIG, str(given)), model=other), tmp_path)
    with pytest.raises(UserError, match=r"`checkpoint.start`: no checkpoint in nowhere"):
        find_start(with_start(CONFIG, "nowhere"), tmp_path)
    # `up` says so before anything is started.
    monkeypatch.setenv("COUNTERPOISE_HOME", str(tmp_path / "home"))
    file = tmp_path / "run.toml"
    file.write_text('[checkpoint]\nstart = "nowhere"\n')
    result = CliRunner().invoke(cli, ["up", "--config", str(file)])
    assert "no checkpoint in nowhere" in str(result.exception)
    assert not (tmp_path / "home" / "logs").exists()


def with_start(config: Config, folder: str) -> Config:
    return msgspec.structs.replace(config, checkpoint=CheckpointConfig(start=folder))


def test_pruning_leaves_one_that_is_being_written(tmp_path: Path, copy: PartCopy) -> None:
    """The last one of a run may be under way while one before it is sealed late."""
    folder = write(tmp_path, 10, copy, 1)
    last = folder.with_name("step-00000021")
    part = checkpoint.write_part(last, "rack-0/0", copy)
    left_by_a_crash = folder.with_name("step-00000015-generation-1")
    checkpoint.write_part(left_by_a_crash, "rack-0/0", copy)
    aside = folder.with_name("damaged-step-00000005")
    aside.mkdir()
    late = write(tmp_path, 20, copy, 1)
    assert sorted(folder.parent.iterdir()) == [aside, late, last]
    seal(last, manifest_of(21, part))
    prune(last, 1)
    assert find_start(CONFIG, tmp_path)[0].step == 21
    assert sorted(folder.parent.iterdir()) == [aside, last]


def test_what_is_not_on_disk_is_not_sealed(tmp_path: Path, copy: PartCopy) -> None:
    older = write(tmp_path, 10, copy)
    folder = older.with_name("step-00000020")
    part = checkpoint.write_part(folder, "rack-0/0", copy)
    file = folder / part.file
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{part.file} is damaged: .* bytes, not"):
        seal(folder, manifest_of(20, part))
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{part.file} is missing"):
        seal(folder, manifest_of(20, part))
    assert checkpoints_by_age([older, folder]) == [older]


def test_the_commands_tell_a_damaged_one(
    tmp_path: Path, copy: PartCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTERPOISE_HOME", str(tmp_path))
    runner = CliRunner()
    assert "no checkpoint yet" in runner.invoke(cli, ["checkpoint", "list"]).output
    folder = write(tmp_path / "runs", 10, copy)
    (listed,) = json.loads(runner.invoke(cli, ["checkpoint", "list", "--json"]).output)
    assert (listed["run"], listed["step"], listed["folder"]) == ("r1", 10, str(folder))
    next(folder.glob("*.safetensors")).unlink()
    result = runner.invoke(cli, ["checkpoint", "verify", str(folder)])
    assert result.exit_code == 1
    assert "is missing" in result.output
    (folder / checkpoint.MANIFEST).write_text("{")
    assert "damaged" in runner.invoke(cli, ["checkpoint", "list"]).output
    aside = set_aside(folder)
    (listed,) = json.loads(runner.invoke(cli, ["checkpoint", "list", "--json"]).output)
    assert (listed["folder"], bool(listed["error"])) == (str(aside), True)


def test_only_the_newest_are_kept(tmp_path: Path, copy: PartCopy) -> None:
    folders = [write(tmp_path, step, copy, 2) for step in (10, 20, 30)]
    assert checkpoints_by_age(folders) == folders[:0:-1]
    assert sorted(folders[0].parent.iterdir()) == folders[1:]
