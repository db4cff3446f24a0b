"""The recorder over every pair of stores: what is in the journal gets into the history, once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine

from storage.history.database import open_history
from storage.history.queries import History
from storage.history.schema import upgrade
from storage.live.memory import MemoryStore
from storage.live.port import LiveStore, LiveStoreDown
from storage.recorder import Recorder
from storage.records import StepCommitted
from tests.contract import records
from tests.contract.records import RUN
from tests.support.services import wait_until

Plant = Callable[[str, int, bytes], None]


@pytest.fixture
def history(engine: Engine) -> History:
    return History(engine)


def make(store: LiveStore, engine: Engine, stop: threading.Event | None = None) -> Recorder:
    return Recorder(store, engine, clock=lambda: 5000.0, stop=stop or threading.Event())


@contextmanager
def running(store: LiveStore, engine: Engine) -> Iterator[None]:
    """A recorder in a thread; its end within 10 s is part of every test."""
    stop = threading.Event()
    thread = threading.Thread(target=make(store, engine, stop).run_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()


def num_steps(history: History) -> int:
    run = history.run(RUN)
    return 0 if run is None else run.steps


def test_it_records_what_is_new_and_acknowledges_it(
    store: LiveStore, engine: Engine, history: History
) -> None:
    recorder, entries = make(store, engine), records.journal(1200)
    assert recorder.record_once() == 0
    store.append(RUN, entries[:700])
    store.append("run-2", [records.started(run="run-2")])
    assert recorder.record_once() == 501
    assert recorder.record_once() == 200
    assert recorder.record_once() == 0
    assert store.acknowledged(RUN) == 700
    store.append(RUN, entries)
    recorder.record_once()
    assert store.acknowledged(RUN) == 1200
    assert num_steps(history) == sum(isinstance(entry, StepCommitted) for entry in entries)
    assert {run.run for run in history.list_runs()} == {RUN, "run-2"}


def test_a_new_recorder_goes_on_where_the_last_one_was(
    store: LiveStore, engine: Engine, history: History
) -> None:
    entries = records.journal(600)
    store.append(RUN, entries)
    assert make(store, engine).record_once() == 500
    assert make(store, engine).record_once() == 100
    assert make(store, engine).record_once() == 0
    assert num_steps(history) == sum(isinstance(entry, StepCommitted) for entry in entries)


def test_bad_entries_are_set_aside_and_block_nothing(
    store: LiveStore, plant: Plant, engine: Engine, history: History
) -> None:
    store.append(RUN, [records.started()])
    plant(RUN, 2, b"\xc1garbage")
    plant(RUN, 3, b"")
    store.append(RUN, [records.step(4), records.event(5, run="another")])
    store.append("run-2", [records.started(run="run-2")])
    make(store, engine).record_once()
    run = history.run(RUN)
    assert run is not None
    assert (run.num_bad_records, run.steps, run.num_missing) == (3, 1, 0)
    kinds = [(event.seq, event.kind) for event in history.events(RUN)]
    assert kinds == [(2, "bad_record"), (3, "bad_record"), (5, "bad_record")]
    assert store.acknowledged(RUN) == 5
    assert history.run("run-2") is not None


def test_a_wiped_store_is_told_again_what_is_recorded(engine: Engine, history: History) -> None:
    entries = records.journal(60)
    before, after = MemoryStore(), MemoryStore()
    recorder = make(before, engine)
    before.append(RUN, entries[:40])
    recorder.record_once()
    recorder._store = after
    after.append(RUN, entries)
    recorder.record_once()
    assert after.acknowledged(RUN) == 60
    run = history.run(RUN)
    assert run is not None
    assert (run.num_missing, run.steps) == (
        0, sum(isinstance(entry, StepCommitted) for entry in entries),
    )  # fmt: skip


class Flaky(MemoryStore):
    """Away until told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = True
        self.num_tries = 0

    def list_journals(self) -> dict[str, tuple[int, int]]:
        self.num_tries += 1
        if self.is_away:
            raise LiveStoreDown("the live store is away")
        return super().list_journals()


def test_it_waits_for_a_live_store_that_is_away(
    engine: Engine, history: History, caplog: pytest.LogCaptureFixture
) -> None:
    store = Flaky()
    store.append(RUN, records.journal(50))
    with caplog.at_level(logging.INFO, "storage.recorder"), running(store, engine):
        wait_until(lambda: store.num_tries >= 3, 10, "three tries")
        assert [record.message for record in caplog.records] == [
            "recording waits: the live store is away"
        ]
        store.is_away = False
        wait_until(lambda: store.acknowledged(RUN) == 50, 10, "the journal's recording")
    assert caplog.records[-1].message == "recording goes on"
    assert history.run(RUN) is not None


def test_it_waits_for_a_history_that_is_locked(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.history.database._BUSY_TIMEOUT_MS", 20)
    url = f"sqlite:///{tmp_path}/history.db"
    engine, other, store = open_history(url), open_history(url), MemoryStore()
    upgrade(engine)
    with other.connect() as holder:
        holder.exec_driver_sql("DELETE FROM positions")
        with running(store, engine):
            store.append(RUN, records.journal(50))
            time.sleep(0)
            assert store.acknowledged(RUN) == 0
            holder.rollback()
            wait_until(lambda: store.acknowledged(RUN) == 50, 10, "the journal's recording")
    assert num_steps(History(engine)) > 0
    engine.dispose()
    other.dispose()


def test_a_second_recorder_waits_and_takes_over(
    empty_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, store = open_history(empty_url), open_history(empty_url), MemoryStore()
    with running(store, second):
        store.append(RUN, records.journal(10))
        wait_until(lambda: store.acknowledged(RUN) == 10, 10, "the first one's work")
        stop = threading.Event()
        waiting = threading.Thread(target=make(store, first, stop).run_forever, daemon=True)
        with caplog.at_level(logging.WARNING):
            waiting.start()
            wait_until(lambda: "another recorder" in caplog.text, 10, "its word")
    try:
        store.append(RUN, records.journal(20))
        wait_until(lambda: store.acknowledged(RUN) == 20, 10, "the second one's work")
    finally:
        stop.set()
        waiting.join(10)
    assert not waiting.is_alive()
    assert "takes over" in caplog.text
    first.dispose()
    second.dispose()


def test_a_waiting_recorder_stops_when_told(empty_url: str) -> None:
    first, second, store = open_history(empty_url), open_history(empty_url), MemoryStore()
    upgrade(first)
    with running(store, first), running(store, second):
        pass
    first.dispose()
    second.dispose()
