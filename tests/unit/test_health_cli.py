"""`counterpoise health parse` and `slow`: formats for scripts and for people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from runtime.commands.health import health
from runtime.config import parse_config
from runtime.errors import ConfigError, UserError
from tests.support.health_lines import NOT_UNDERSTOOD, ONE_LINE

KEYS = {
    "gpu", "source", "code", "subcode", "cause_of",
    "severity", "verdict", "action", "count", "line",
}  # fmt: skip


def run(*args: str) -> Result:
    return CliRunner().invoke(health, list(args), catch_exceptions=False)


def test_parse_json(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text("\n".join([*ONE_LINE, "[1.0] nothing", *NOT_UNDERSTOOD]) + "\n")
    answer = json.loads(run("parse", str(path), "--json").stdout)
    assert [set(each) == KEYS for each in answer["events"]] == [True] * len(ONE_LINE)
    assert answer["num_events"] == len(ONE_LINE)
    assert answer["num_not_understood"] == len(NOT_UNDERSTOOD)
    assert answer["kind"] == "kernel_log"
    first = answer["not_understood"][0]
    assert first["line"] == len(ONE_LINE) + 2
    assert first["reason"]


@pytest.mark.parametrize("content", ["", "\0\xff\n", "<6>hello\n"])
def test_parse_json_of_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    answer = json.loads(run("parse", str(path), "--json").stdout)
    assert (answer["events"], answer["num_not_understood"]) == ([], 0)


def test_parse_table_and_rulings_of_the_config(tmp_path: Path) -> None:
    path, config = tmp_path / "kern.log", tmp_path / "run.toml"
    path.write_text(next(iter(ONE_LINE)) + "\n" + NOT_UNDERSTOOD[0])
    assert "healthy" in run("parse", str(path)).stdout
    assert "1 not understood" in run("parse", str(path)).stdout
    config.write_text('[health.xid]\n"13" = "fail"\n')
    assert "failed" in run("parse", str(path), "--config", str(config)).stdout


def test_slow_json(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    rows = [
        f"{worker},{at},{1.0 + (worker == 2 and 40 <= at < 70) + 0.01 * ((at * 7 + worker) % 5)}"
        for at in range(100)
        for worker in range(6)
    ]
    path.write_text("worker,time,duration\n" + "\n".join(rows) + "\n")
    (found,) = json.loads(run("slow", str(path), "--json").stdout)
    assert set(found) == {"worker", "from", "to", "ratio"}
    assert (found["worker"], found["from"], found["to"]) == (2, 40.0, 69.0)
    assert found["ratio"] == pytest.approx(2.0, rel=0.05)
    assert "still" not in run("slow", str(path)).stdout


def test_a_file_that_is_no_csv_is_told(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="no column for the worker"):
        run("slow", str(path))
    path.write_text("<html>")
    with pytest.raises(UserError, match="not an <nvidia_smi_log>"):
        run("parse", str(path))


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"xid": {"sixty": "ignore"}}, "Xid or SXid numbers"),
        ({"xid": {"63": "maybe"}}, "maybe"),
        ({"gpus": {"GPU-a": "nowhere"}}, "RACK/SLOT"),
        ({"sources": ["dmesg"]}, "dmesg"),
        ({"prometheus": "127.0.0.1:9400"}, "URL"),
        ({"slow_ratio": 1.0}, "slow_ratio"),
        ({"verdict": {"repeats": 1}}, "2 or more"),
        ({"colour": 1}, "colour"),
    ],
)
def test_the_config_is_checked(section: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_config({"health": section}, origin="run.toml")
