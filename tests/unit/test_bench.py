"""What the benchmarks count, compare and tell; tests/distributed runs the measurements."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from runtime.bench import history, units
from runtime.bench.benchmark import Benchmark, Target
from runtime.bench.drill import lost_steps
from runtime.bench.leftover import processes_of
from runtime.bench.parity import count_samples, max_loss_rel_diff, max_param_abs_diff
from runtime.commands import bench as command
from runtime.errors import CounterpoiseError, UserError
from storage.records import StepCommitted


def committed(step: int, samples: Sequence[tuple[int, int, int]] = (), loss: float = 1.0) -> Any:
    return StepCommitted(
        seq=step,
        at=float(step),
        run="r",
        step=step,
        generation=1,
        loss=loss,
        grad_norm=1.0,
        tokens=1,
        step_s=1.0,
        exposed_sync_s=0.0,
        samples=tuple(samples),
        replica_step_s=(),
    )


# ── samples and steps ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("commits", "expected"),
    [
        ([[(0, 0, 2), (1, 2, 2)], [(1, 4, 4)]], (0, 0)),
        ([[(0, 0, 2)], [(1, 4, 4)]], (2, 0)),
        ([[(0, 0, 4)], [(1, 3, 5)]], (0, 1)),
        ([[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2)]], (0, 2)),
        ([], (8, 0)),
    ],
    ids=["each once", "two missing", "one twice", "two that are not the run's", "none"],
)
def test_samples_are_counted(commits: list[Any], expected: tuple[int, int]) -> None:
    entries = [committed(step, samples) for step, samples in enumerate(commits)]
    assert count_samples(entries, 8) == expected


@pytest.mark.parametrize(
    ("steps", "lost"),
    [([0, 1, 2], 0), ([], 0), ([0, 2], 1), ([0, 1, 1], 1), ([1, 1, 3], 3)],
)
def test_gaps_and_repeats_are_lost_steps(steps: list[int], lost: int) -> None:
    assert lost_steps([committed(step) for step in steps]) == lost


def test_loss_is_compared_at_every_step() -> None:
    commits = [committed(0, loss=2.0), committed(1, loss=4.4)]
    assert max_loss_rel_diff([2.0, 4.0], commits) == pytest.approx(0.1)
    assert math.isinf(max_loss_rel_diff([2.0, 4.0, 1.0], commits))


def test_parameters_are_compared_one_by_one() -> None:
    ours = {"wq.0": torch.zeros(2, 3), "head.-1": torch.tensor([[1.0, -2.5]])}
    theirs = {"wq.0": torch.zeros(2, 3), "head.-1": torch.tensor([[1.0, -2.0]])}
    assert max_param_abs_diff(ours, theirs) == 0.5
    with pytest.raises(CounterpoiseError, match=r"wq\.0"):
        max_param_abs_diff({"head.-1": ours["head.-1"]}, theirs)


# ── what is left running ──────────────────────────────────────────────────────────────────────


def test_processes_are_told_by_their_environment() -> None:
    waits = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
    with subprocess.Popen(
        waits,
        env={**os.environ, "COUNTERPOISE_HOME": "/nowhere/a"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        found = processes_of("COUNTERPOISE_HOME", "/nowhere/a")
        assert [line.partition(" ")[0] for line in found] == [str(process.pid)]
        assert not processes_of("COUNTERPOISE_HOME", "/nowhere")
        process.kill()
    assert not processes_of("COUNTERPOISE_HOME", "/nowhere/a")


# ── the command ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def one_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark that takes no time: one target reached, one missed."""
    made = Benchmark(
        name="made_up",
        summary="two figures",
        measure=lambda say: say("working") or {"quick_s": 0.5, "slow_s": 3.25, "raw": [1, 2]},
        targets=lambda _: [
            Target(figure="quick_s", at_most=1.0, why="quick enough"),
            Target(figure="slow_s", at_most=2.0, why="not so slow"),
        ],
    )
    monkeypatch.setattr(command, "BENCHMARKS", {"made_up": made})


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(command.bench, arguments, catch_exceptions=False)


def test_names_come_one_a_line() -> None:
    names = ["parity", "recovery", "startup", "health", "dashboard", "history", "sync"]
    names += ["units", "peers", "goodput", "cluster"]
    assert run_command("--list").stdout.split() == names


@pytest.mark.usefixtures("one_benchmark")
def test_table_says_which_target_is_missed() -> None:
    done = run_command("made_up")
    assert done.exit_code == 0, "a missed target is a finding, not an error"
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "reached" in lines["quick_s"]
    assert "MISSED" in lines["slow_s"]
    assert "<= 2" in lines["slow_s"]
    assert "raw" not in lines
    assert "working" in done.stderr


@pytest.mark.usefixtures("one_benchmark")
def test_json_is_one_object_on_stdout() -> None:
    figures = json.loads(run_command("made_up", "--json").stdout)
    assert (figures["slow_s"], figures["raw"]) == (3.25, [1, 2])


@pytest.mark.parametrize("arguments", [[], ["speed"]])
def test_unknown_name_is_answered_with_the_known_ones(arguments: list[str]) -> None:
    with pytest.raises(UserError, match="parity, recovery, startup"):
        run_command(*arguments)


def test_figure_that_is_absent_reaches_no_target() -> None:
    target = Target(figure="a_s", at_most=1.0, why="")
    assert not target.is_reached({})
    assert not target.is_reached({"a_s": math.nan})
    assert target.is_reached({"a_s": 1.0})


def test_units_are_within_two_percent_of_even() -> None:
    figures = units.measure(lambda _: None)
    assert all(target.is_reached(figures) for target in units.BENCHMARK.targets(figures))
    assert figures["max_over_even_whole"] == {
        "64/7": pytest.approx(10 * 7 / 64),
        "128/30": pytest.approx(5 * 30 / 128),
    }
    assert figures["max_over_even_fractional"].keys() == {"64/7", "128/30"}


def test_history_is_asked_of_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "NUM_RUNS", 12)
    monkeypatch.setattr(history, "COMPARED", 1)
    monkeypatch.setattr(history, "TIMES", 1)
    monkeypatch.setattr(history, "STEPS_A_RUN", 600)
    figures = history.measure(lambda _: None)
    assert (figures["runs"], figures["step_rows"]) == (12, 12 * 600)
    for target in history.targets(figures):
        assert figures[target.figure] > 0
