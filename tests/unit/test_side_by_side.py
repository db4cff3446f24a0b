"""The comparison's table: what it says of the figures kept, and README shows that very table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from runtime.bench.side_by_side import NAMES, markdown, rows
from runtime.commands.bench import bench
from runtime.errors import UserError

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "measurements" / "side-by-side.json"


@pytest.fixture
def kept() -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    assert tuple(figures) == NAMES
    return figures


def test_readme_shows_the_table_of_the_figures_kept(kept: dict[str, Any]) -> None:
    table = markdown(rows(kept))
    assert table in (ROOT / "README.md").read_text(encoding="utf-8"), f"README needs:\n{table}"


def test_the_command_prints_it() -> None:
    done = CliRunner().invoke(bench, ["--table", str(KEPT)], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.startswith("| compared | measured | to reach |")
    assert "alive but hung, and SIGSTOP" in done.stdout


def test_what_falls_short_is_missed(kept: dict[str, Any]) -> None:
    peers, sync, goodput = (kept[name] for name in NAMES)
    worse = {
        "peers": peers
        | {"step_ratio_bare": 1.2, "recovery_s": 4.0, "steps_redone": 1, "fence_hang_s": 7.0},
        "sync": sync | {"intra_rack_bytes_direct": 4, "mixed_over_uniform": 1.02},
        "goodput": goodput | {"below_allowed": 0.02},
    }
    missed = [row.compared.partition(":")[0] for row in rows(worse) if row.reached is False]
    assert missed == [
        "the same",
        "mixed shapes, `direct` / `reshard`",
        "step time per unit of work",
        "SIGKILL to the next committed step, 2 x TP2",
        "of it",
        "alive but hung, and SIGSTOP",
        "goodput of 10 minutes, a kill every 30 s (simulated, costs measured)",
    ]


def test_a_peer_that_did_not_run_is_told(kept: dict[str, Any]) -> None:
    without = {"peers": kept["peers"] | {"recovery_s_torchft_tuned": None}}
    (row,) = [row for row in rows(without) if row.compared.startswith("SIGKILL")]
    assert row.reached is None
    assert "not measured" in row.measured
    assert "not measured" in markdown([row])


def test_a_wider_run_has_rows_of_its_own(kept: dict[str, Any]) -> None:
    wider = {f"tp4_{key}": value for key, value in kept["peers"].items()}
    wider["tp4_ranks_in_play"] = 7
    found = rows({"peers": kept["peers"] | wider})
    assert [row.reached for row in found if "TP4" in row.compared] == [True]
    assert any("0 redone; 7 of 8" in row.to_reach for row in found)


def test_figures_of_another_version_are_refused(kept: dict[str, Any]) -> None:
    del kept["goodput"]["below_allowed"]
    with pytest.raises(UserError, match="lack 'below_allowed'"):
        rows(kept)


@pytest.mark.parametrize("text", ["not json", "[]", '{"peers": 1}'])
def test_what_is_no_figures_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "figures.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"figures\.json"):
        CliRunner().invoke(bench, ["--table", str(path)], catch_exceptions=False)
