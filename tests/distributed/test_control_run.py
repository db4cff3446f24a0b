"""Whole runs with real worker processes: kills, hangs, lost connections, and what comes of them."""

from __future__ import annotations

import signal
import socket
import time
from multiprocessing import AuthenticationError
from pathlib import Path

import pytest

from runtime.control.channel import connect
from runtime.errors import CounterpoiseError
from storage.commands import CommandResult, Decide
from storage.records import GenerationFormed, RunEnded, StepCommitted
from tests.support.control_run import DEADLINE_S, run_config, trial

pytestmark = pytest.mark.timeout(120)


def test_kill_shrink_repair_grow_and_nobody_who_lives_is_replaced(tmp_path: Path) -> None:
    with trial(run_config(2, 2), tmp_path) as made:
        pids = made.drill.pids()
        killed = made.drill.kill("rack-0/1")
        first = made.drill.next_generation(killed)
        # 1 s and a step is the promise on a quiet machine; here others work as well.
        assert first.at - killed.at < 5.0
        assert {replica for replica, _, _ in first.samples} == {1}
        made.more_steps(2)
        made.approve(0)
        assert made.shape() == [(0,), (0, 1)]
        made.more_steps(2)
        made.repair("rack-0/1")
        made.until(
            lambda: (p := made.open_for(0)) is not None and p.kind == "grow", "a grow proposal"
        )
        made.approve(0)
        assert made.shape() == [(0, 1), (0, 1)]
        made.more_steps(2)
        now = made.drill.pids()
        assert {gpu for gpu in pids if pids[gpu] != now[gpu]} == {"rack-0/1"}
        made.stop()
        formed = [e for e in made.drill.entries if isinstance(e, GenerationFormed)]
        assert [len(f.proposal) > 0 for f in formed] == [False, False, True, True]
    made.check()


def test_a_hang_is_fenced_and_the_run_goes_on(tmp_path: Path) -> None:
    with trial(run_config(2, 2), tmp_path) as made:
        made.signal("rack-1/0", signal.SIGSTOP)
        began = time.monotonic()
        made.left_out(1)
        # 2 s without a step, two more before a pulse is missed for sure, and a busy machine.
        assert time.monotonic() - began < 10.0
        (event,) = made.events("rank_fenced")
        assert event.gpu == "rack-1/0"
        assert made.events("gpu_failed")[0].message.endswith("its worker ended by signal 9")
        made.more_steps(2)
        made.stop()
    made.check()


def test_a_worker_killed_while_the_next_generation_is_entered(tmp_path: Path) -> None:
    with trial(run_config(2, 2, 2), tmp_path) as made:
        made.kill("rack-0/0")
        made.until(lambda: made.coordinator.phase == "entering", "a generation being entered")
        made.kill("rack-2/1")
        made.left_out(0, 2)
        assert made.shape() == [(), (0, 1), ()]
        made.more_steps(2)
        made.approve(0)
        made.approve(2)
        assert made.shape() == [(1,), (0, 1), (0,)]
        made.more_steps(2)
        made.stop()
    made.check()


def test_two_at_once_then_all_of_one_replica(tmp_path: Path) -> None:
    with trial(run_config(2, 2, 2), tmp_path) as made:
        made.kill("rack-0/1", "rack-1/0")
        made.left_out(0, 1)
        made.more_steps(2)
        stale = made.proposal(0)
        made.kill("rack-0/0")
        made.until(lambda: made.coordinator.plan.replicas[0].mode == "out", "replica 0 out")
        made.more_steps(2)
        # The proposal for what is gone cannot be approved any more.
        with pytest.raises(CounterpoiseError, match="is stale"):
            made.drill.approve(stale)
        made.approve(1)
        assert made.shape() == [(), (1,), (0, 1)]
        made.more_steps(2)
        made.stop()
    made.check()


def test_all_replicas_die(tmp_path: Path) -> None:
    with trial(run_config(2, 2), tmp_path) as made:
        made.kill(*sorted(made.drill.pids()))
        finish = made.run.join(DEADLINE_S)
        assert finish.status == "failed"
        assert "no replica has a live slot" in finish.reason
        snapshot = made.coordinator.snapshot(time.time())
        assert (snapshot.status, snapshot.status_reason) == ("failed", finish.reason)
        assert isinstance(made.journal()[-1], RunEnded)
    made.check()


def test_strangers_garbage_and_lost_connections(tmp_path: Path) -> None:
    with trial(run_config(2, 2), tmp_path) as made:
        address = made.run.controller.address
        # One who connects and says nothing keeps nobody out.
        silent = socket.create_connection(address)
        stranger = socket.create_connection(address)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with pytest.raises(AuthenticationError):
            connect(*address, b"a wrong key, but long enough")
        insider = connect(*address, made.run.controller._key)
        insider.send(b'{"type": "nothing of the kind"}')
        assert insider.receive() is None
        insider.close()
        generation = made.coordinator.number
        for how in ("broken", "broken", "garbage"):
            before, channel = made.run.controller._channels["localhost"]
            if how == "garbage":
                channel.send(b"nothing of the kind")
            else:
                made.break_connection()
            made.until(
                lambda b=before: made.run.controller._channels["localhost"][0] != b,
                "the agent to reconnect",
            )
            made.more_steps(2)
        assert made.coordinator.number == generation
        assert not made.events("gpu_failed")
        # An order that falls into a gap is given again.
        made.kill("rack-0/1")
        made.left_out(0)
        proposal = made.proposal(0)
        made.break_connection()
        mark = made.drill.approve(proposal)
        made.drill.next_generation(mark)
        assert made.shape() == [(0,), (0, 1)]
        silent.close()
        stranger.close()
        made.stop()
    made.check()


def test_what_cannot_be_done_changes_nothing(tmp_path: Path) -> None:
    with trial(run_config(2, 2), tmp_path) as made:
        made.kill("rack-0/1")
        made.left_out(0)
        proposal = made.proposal(0)

        def answer(**more: object) -> CommandResult:
            fields = {
                "id": f"c{len(made.drill.entries)}", "at": time.time(), "who": "ada", "via": "cli",
                "proposal": proposal.id, "generation": proposal.generation,
                "revision": proposal.revision, "verdict": "approved",
            } | more  # fmt: skip
            command = Decide(**fields)  # type: ignore[arg-type]
            index = len(made.drill.entries)
            made.run.submit(command)
            found = made.run.wait_for(
                lambda e: isinstance(e, CommandResult) and e.id == command.id, DEADLINE_S, index
            )
            assert isinstance(found, CommandResult)
            return found

        assert answer(option=17).code == "invalid"
        assert answer(generation=1).code == "stale"
        assert answer(proposal="p99").code == "unknown"
        generation = made.coordinator.number
        made.more_steps(2)
        assert made.coordinator.number == generation
        assert made.open_for(0) is not None
        made.stop()
    made.check()


def test_ends_by_itself_after_its_steps(tmp_path: Path) -> None:
    with trial(run_config(2, 1, step_s=0.05, steps=12), tmp_path) as made:
        finish = made.run.join(DEADLINE_S)
        assert finish.reason == "all 12 steps are done"
    made.check()
    steps = [entry for entry in made.journal() if isinstance(entry, StepCommitted)]
    assert len(steps) == 12
