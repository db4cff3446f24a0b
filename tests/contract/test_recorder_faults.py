"""Real faults around the recorder: processes killed at random, and nothing missing or doubled."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
from sqlalchemy import func, select

from storage.history.database import open_history
from storage.history.queries import History
from storage.history.schema import upgrade
from storage.history.tables import DECISIONS, EVENTS, GENERATIONS, LEDGER, PROPOSALS, STEPS
from storage.live.port import LiveStoreDown
from storage.live.redis_store import RedisStore
from storage.recorder import Recorder
from storage.records import (
    DecisionMade,
    EventHappened,
    GenerationFormed,
    JournalEntry,
    LedgerSpent,
    ProposalChanged,
    StepCommitted,
)
from tests.contract import records
from tests.contract.records import RUN
from tests.support.services import RedisServer, wait_until

TABLES = {
    STEPS: StepCommitted,
    EVENTS: EventHappened,
    GENERATIONS: GenerationFormed,
    PROPOSALS: ProposalChanged,
    DECISIONS: DecisionMade,
    LEDGER: LedgerSpent,
}
NUM_KILLS = 6


@contextmanager
def recorder_process(redis_url: str, database_url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Killed, not stopped, at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.contract.recorder_process", redis_url, database_url]
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def assert_recorded(database_url: str, entries: list[JournalEntry]) -> None:
    """Every entry is in its table once, and the sums are those of the entries."""
    engine = open_history(database_url)
    with engine.connect() as connection:
        for table, kind in TABLES.items():
            found = connection.scalars(select(table.c.seq).order_by(table.c.seq)).all()
            assert found == [entry.seq for entry in entries if isinstance(entry, kind)], table.name
        spent = connection.scalar(select(func.sum(LEDGER.c.end_at - LEDGER.c.begin_at)))
    run = History(engine).run(RUN)
    assert run is not None
    steps = [entry for entry in entries if isinstance(entry, StepCommitted)]
    assert (run.steps, run.tokens) == (len(steps), 1024 * len(steps))
    assert (run.num_missing, run.num_bad_records) == (0, 0)
    assert sum(run.ledger.values()) == pytest.approx(spent)
    engine.dispose()


@pytest.mark.timeout(90)
def test_a_recorder_killed_at_random_moments_misses_and_doubles_nothing(
    redis_url: str, empty_url: str
) -> None:
    store, draw = RedisStore.for_service(redis_url), random.Random(7)
    entries = records.journal(NUM_KILLS * 3000)
    for number in range(NUM_KILLS):
        begin = number * 3000
        store.append(RUN, entries[begin : begin + 3000])
        goal = draw.randrange(begin, begin + 2500)
        with recorder_process(redis_url, empty_url):
            # Killed somewhere after `goal`, in whatever it is doing then
            wait_until(lambda goal=goal: store.acknowledged(RUN) > goal, 30, "some recording")
            time.sleep(draw.random() * 0.02)
    with recorder_process(redis_url, empty_url):
        wait_until(lambda: store.acknowledged(RUN) == len(entries), 30, "the rest")
    assert_recorded(empty_url, entries)
    store.close()


@pytest.mark.parametrize("redis_server", ["embedded", "system"], indirect=True)
def test_redis_killed_and_wiped_under_a_running_recorder(
    redis_server: RedisServer, empty_url: str
) -> None:
    """A writer that resends from the last seq the store holds, as the controller does."""
    entries, store = records.journal(6000), RedisStore.for_service(redis_server.url)
    engine, stop = open_history(empty_url), threading.Event()
    upgrade(engine)
    reading = RedisStore.for_service(redis_server.url)
    recorder = Recorder(reading, engine, clock=lambda: 5000.0, stop=stop)
    thread = threading.Thread(target=recorder.run_forever, daemon=True)
    thread.start()
    try:
        for number, goal in enumerate(range(1000, 6001, 1000)):
            publish(store, entries[:goal])
            if number % 2:
                redis_server.kill()
                redis_server.restart()
            else:
                client = redis.Redis.from_url(redis_server.url)
                client.flushall()
                client.close()
        publish(store, entries)
        wait_until(lambda: acknowledged(store) == len(entries), 30, "all entries in the history")
    finally:
        stop.set()
        thread.join(15)
    assert not thread.is_alive()
    assert_recorded(empty_url, entries)
    engine.dispose()
    reading.close()
    store.close()


def publish(store: RedisStore, entries: list[JournalEntry]) -> None:
    """All of `entries`, whatever the store has lost of them; gives up after 20 s."""
    deadline, held = time.monotonic() + 20, entries[-1].seq - 1
    while held < entries[-1].seq:
        assert time.monotonic() < deadline
        try:
            held = store.append(RUN, entries[held:][:300], after=held)
        except LiveStoreDown:
            continue


def acknowledged(store: RedisStore) -> int:
    try:
        return store.acknowledged(RUN)
    except LiveStoreDown:
        return 0
