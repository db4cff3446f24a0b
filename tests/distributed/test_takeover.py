"""A killed controller is started again and takes the run over: nothing stops, nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from runtime.control.outbox import Outbox
from storage.records import (
    DecisionMade,
    EventHappened,
    JournalEntry,
    LedgerSpent,
    RunEnded,
    StepCommitted,
)
from tests.support.services import wait_until
from tests.support.up import Up

CONFIG = """
[train]
state_hash_every = 10

[cluster]
racks = [{ name = "a", gpus = 2 }, { name = "b", gpus = 2 }]

[emulated]
step_s = 0.2
"""
GPU = "a/1"


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG, encoding="utf-8")
    running = Up(tmp_path / "home", "--config", str(config))
    yield running
    running.kill_hard()


@pytest.mark.timeout(240)
def test_a_killed_controller_takes_the_run_over(up: Up) -> None:
    up.start()
    up.await_line(r"training +first step committed")
    _kill_controller(up)
    up.await_line(r"the controller took the run over")
    step = up.cli("status")["step"]
    wait_until(lambda: up.cli("status")["step"] > step, 30.0, "steps after the first take-over")

    assert up.cli("fault", "kill", GPU)["ok"]
    wait_until(lambda: _open(up) is not None, 30.0, "a proposal")
    proposal = _open(up)
    assert proposal is not None
    answer = up.cli("approve", proposal["id"], "--yes")
    assert answer["ok"], answer
    # Wherever this hits (applying, entering or already applied), the decision takes effect once.
    _kill_controller(up)
    wait_until(lambda: _degree(up) == 1, 60.0, "a replica of degree 1")
    wait_until(
        lambda: up.cli("proposals", proposal["id"])[0]["state"] == "applied", 30.0, "applied"
    )

    assert up.interrupt() == 0
    wait_until(lambda: not up.processes(), 10.0, f"an end of {up.processes()}")
    _check(_journal(up))


def _kill_controller(up: Up) -> None:
    """SIGKILL it and wait for the next one, so that nobody talks to the one that is gone."""
    pids = [pid for pid, line in up.processes().items() if " controller --" in line]
    assert len(pids) == 1, up.processes()
    os.kill(pids[0], signal.SIGKILL)
    count = up.said().count("controller ended with -9")
    wait_until(
        lambda: up.said().count("controller ended with -9") > count, 20.0, "a restart to be told"
    )


def _open(up: Up) -> dict[str, Any] | None:
    return next((p for p in up.cli("proposals") if p["state"] == "open"), None)


def _degree(up: Up) -> int:
    replica = up.cli("status")["replicas"][0]
    return len(replica["live"]) if replica["mode"] == "training" else 0


def _journal(up: Up) -> list[JournalEntry]:
    (home,) = (up.home / "runs").iterdir()
    outbox = Outbox(home / "journal", run=home.name, store=None)
    entries = outbox.read_all()
    outbox.close()
    return entries


def _check(entries: list[JournalEntry]) -> None:
    steps = [entry.step for entry in entries if isinstance(entry, StepCommitted)]
    assert steps == list(range(len(steps)))
    samples = [
        sample
        for entry in entries
        if isinstance(entry, StepCommitted)
        for _, first, count in entry.samples
        for sample in range(first, first + count)
    ]
    assert sorted(samples) == list(range(len(samples)))
    decisions = [entry for entry in entries if isinstance(entry, DecisionMade)]
    assert len(decisions) == 1
    spans = [entry for entry in entries if isinstance(entry, LedgerSpent)]
    for before, after in pairwise(spans):
        assert after.begin == pytest.approx(before.end, abs=1e-6)
    kinds = [entry.kind for entry in entries if isinstance(entry, EventHappened)]
    assert kinds.count("controller_restarted") == 2
    assert isinstance(entries[-1], RunEnded)
    assert entries[-1].status == "stopped"
