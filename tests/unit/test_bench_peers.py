"""What `bench peers` makes of what it sees: gaps, steps redone, peers that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.bench.peers import comparison, outside, recovery
from runtime.bench.peers.jobs import Committed, PeerLog
from runtime.bench.peers.outside import NotRunnable, steps_per_s


def commits(*at: float, first: int = 0) -> list[Committed]:
    return [Committed(at=t, step=first + i, replica=0) for i, t in enumerate(at)]


def test_a_step_that_was_just_ending_is_no_recovery() -> None:
    after = commits(0.05, 5.0, 5.1, 5.2)
    assert recovery._after_gap(after, healthy_steps_per_s=10.0) == after[1:]
    assert recovery._after_gap(after[1:], healthy_steps_per_s=10.0) == after[1:]


def test_steps_redone_are_those_committed_again() -> None:
    assert recovery._redone(commits(0.0, 0.1, first=16), commits(5.0, first=10)) == 8
    assert recovery._redone(commits(0.0, 0.1, first=16), commits(5.0, first=18)) == 0


def test_a_log_tells_whole_lines_only(tmp_path: Path) -> None:
    log = PeerLog(tmp_path)
    assert log.commits(0) == []
    log.committed(3, 0)
    log.committed(4, 0)
    with (tmp_path / "commits-0").open("ab") as file:
        file.write(b'{"at": 1')
    assert [c.step for c in log.commits(0)] == [3, 4]


def test_pace_needs_two_commits() -> None:
    assert steps_per_s(commits(1.0)) == 0.0
    assert steps_per_s(commits(1.0, 1.5, 2.0)) == pytest.approx(2.0)


def test_a_peer_that_is_not_installed_is_told_as_such() -> None:
    def act() -> recovery.Recovered:
        outside.require("no_such_peer")
        raise AssertionError("it cannot be there")

    with pytest.raises(NotRunnable, match="extra `peers`"):
        act()
    figures: dict[str, Any] = {}
    comparison._put(figures, "recovery_s_torchft", recovery.or_reason(act), "recovery_s")
    assert figures["recovery_s_torchft"] is None
    assert figures["not_measured"]["recovery_s_torchft"].startswith("not measured: no_such_peer")


def test_recovery_is_held_against_the_peers_that_ran() -> None:
    figures = {"recovery_s_torchft": 5.0, "recovery_s_torchft_tuned": None}
    found = [t.at_most for t in comparison.targets(figures) if t.figure == "recovery_s"]
    assert found == [0.5]
