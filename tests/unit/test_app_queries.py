"""One reader for all sessions: few reads, nothing lost, and words when the store is away."""

from __future__ import annotations

from typing import Any

import pytest

from app.commands import Author, Commands, explain, mint
from app.queries import LiveReader
from app.tail import MAX_STEPS
from storage.live.memory import MemoryStore
from storage.live.port import LiveStoreDown
from storage.records import StepCommitted
from tests.support.feeder import Feeder


class Flaky:
    """A store that can be switched off, and counts what it is asked."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.down = False
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any, **options: Any) -> Any:
            if self.down:
                raise LiveStoreDown("Redis at somewhere cannot be reached")
            self.calls.append(name)
            return method(*args, **options)

        return call


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> Flaky:
    return Flaky(MemoryStore())


@pytest.fixture
def feeder(store: Flaky) -> Feeder:
    feeder = Feeder(store, prefill=30)  # type: ignore[arg-type]
    feeder.begin()
    return feeder


def test_many_sessions_cost_one_read(store: Flaky, feeder: Feeder) -> None:
    clock = Clock()
    reader = LiveReader(store, clock)  # type: ignore[arg-type]
    first = reader.read(feeder.run)
    store.calls.clear()
    assert all(reader.read(feeder.run) is first for _ in range(20))
    assert store.calls == []
    clock.now += 1
    reader.read(feeder.run)
    assert sorted(store.calls) == ["get_racks", "get_run", "list_proposals", "read_journal"]


def test_journal_is_read_onwards(store: Flaky, feeder: Feeder) -> None:
    clock = Clock()
    reader = LiveReader(store, clock)  # type: ignore[arg-type]
    assert reader.read(feeder.run).steps.step[-1] == 30
    feeder._commit(1.0)
    feeder._append_all()
    clock.now += 1
    steps = reader.read(feeder.run).steps
    assert list(steps.step) == list(range(1, 32))
    assert len(steps.step) <= MAX_STEPS


def test_store_away_keeps_the_last_snapshot(store: Flaky, feeder: Feeder) -> None:
    clock = Clock()
    reader = LiveReader(store, clock)  # type: ignore[arg-type]
    before = reader.read(feeder.run)
    store.down = True
    clock.now += 2
    during = reader.read(feeder.run)
    assert during.state == before.state
    assert "cannot be reached" in during.down
    assert reader.runs()[1]
    store.down = False
    clock.now += 2
    assert reader.read(feeder.run).down == ""


def test_store_that_forgot_the_run_is_not_an_empty_page(store: Flaky, feeder: Feeder) -> None:
    clock = Clock()
    reader = LiveReader(store, clock)  # type: ignore[arg-type]
    before = reader.read(feeder.run)
    store._store = MemoryStore()
    clock.now += 2
    after = reader.read(feeder.run)
    assert after.state == before.state
    assert after.down


def test_a_decision_counts_once(store: Flaky, feeder: Feeder) -> None:
    feeder.fault("r1/3", "kill")
    proposal = feeder.proposal
    assert proposal is not None
    commands = Commands(store, Author(who="ann"), lambda: proposal.created_at + 1)  # type: ignore[arg-type]
    command = mint()
    first = commands.decide(command, proposal, "approved", 0)
    again = commands.decide(command, proposal, "approved", 0)
    assert (first.code, again.code) == ("accepted", "duplicate")
    assert again.ok
    late = commands.decide(mint(), proposal, "rejected", reason="no")
    assert not late.ok
    assert "decided" in explain(late) or "stale" in explain(late)


def test_a_command_while_the_store_is_away(store: Flaky, feeder: Feeder) -> None:
    store.down = True
    commands = Commands(store, Author(who="ann"))  # type: ignore[arg-type]
    result = commands.fault(mint(), feeder.run, "r0/0", "kill")
    assert not result.ok
    assert explain(result).startswith("Not sent")


def test_feeder_commits_each_step_once(feeder: Feeder) -> None:
    steps = [one.step for one in feeder.entries if isinstance(one, StepCommitted)]
    assert steps == list(range(1, 31))
