"""The notifier over every live store: at least once, through dead endpoints, stores and itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.errors import UserError
from runtime.notify.channels import Channel, Webhook
from runtime.notify.notifier import Notifier
from storage.live.memory import MemoryStore
from storage.live.port import JOURNAL_TAIL, LiveStore, LiveStoreDown
from tests.contract import records
from tests.contract.records import RUN
from tests.support.endpoints import HttpEndpoint, closed_port, http_endpoint
from tests.support.services import RedisServer, wait_until

BASE = "http://127.0.0.1:8501"
DEADLINE_S = 20.0


def make(
    store: LiveStore, channels: list[Channel], folder: Path, stop: threading.Event | None = None
) -> Notifier:
    return Notifier(
        store, channels, folder, base_url=BASE, clock=time.time, stop=stop or threading.Event()
    )


@contextmanager
def running(store: LiveStore, channels: list[Channel], folder: Path) -> Iterator[Notifier]:
    """A notifier in a thread; its end within 15 s is part of every test."""
    stop = threading.Event()
    notifier = make(store, channels, folder, stop)
    thread = threading.Thread(target=notifier.run_forever, daemon=True)
    thread.start()
    try:
        yield notifier
    finally:
        stop.set()
        thread.join(15)
        assert not thread.is_alive()


def webhook(endpoint: HttpEndpoint, path: str = "/hook") -> Channel:
    return Webhook(endpoint.url(path), BASE)


def told(endpoint: HttpEndpoint, path: str = "/hook") -> list[str]:
    return [json.loads(post.body)["id"] for post in endpoint.posts if post.path == path]


def proposed(seq: int, name: str) -> records.ProposalChanged:
    now = time.time()
    made = records.proposed(seq, id=name, created_at=now, expires_at=now + 900.0)
    return records._made(made, {"at": now})


def test_a_proposal_reaches_a_webhook(store: LiveStore, tmp_path: Path) -> None:
    store.append(RUN, [records.started()])
    with http_endpoint() as endpoint, running(store, [webhook(endpoint)], tmp_path):
        store.append(RUN, [records.started(), proposed(2, "p-1"), proposed(3, "p-2")])
        wait_until(lambda: len(told(endpoint)) == 2, DEADLINE_S, "both notices")
        assert told(endpoint) == [f"{RUN}:p-1:open", f"{RUN}:p-2:open"]
        said = store.get_notifier
        wait_until(
            lambda: (state := said()) is not None and state.channels[0].delivered == 2,
            DEADLINE_S,
            "its word of it",
        )
    # The entries stay for the recorder
    assert store.acknowledged(RUN) == 0
    assert len(store.read_journal(RUN, 0)) == 3


def test_the_past_is_not_told_at_the_first_start(tmp_path: Path) -> None:
    store = MemoryStore()
    old = records.proposed(2)
    store.append(RUN, [records.started(), old])
    with http_endpoint() as endpoint, running(store, [webhook(endpoint)], tmp_path):
        store.append(RUN, [proposed(3, "p-9")])
        wait_until(lambda: bool(endpoint.posts), DEADLINE_S, "the new one")
        assert told(endpoint) == [f"{RUN}:p-9:open"]


def test_what_came_while_it_was_away_is_told_once(tmp_path: Path) -> None:
    store = MemoryStore()
    with http_endpoint() as endpoint:
        with running(store, [webhook(endpoint)], tmp_path):
            store.append(RUN, [records.started(), proposed(2, "p-1")])
            wait_until(lambda: len(told(endpoint)) == 1, DEADLINE_S, "the first")
        store.append(RUN, [proposed(3, "p-2")])
        with running(store, [webhook(endpoint)], tmp_path):
            wait_until(lambda: len(told(endpoint)) >= 2, DEADLINE_S, "the second")
        with running(store, [webhook(endpoint)], tmp_path):
            store.append(RUN, [proposed(4, "p-3")])
            wait_until(lambda: len(told(endpoint)) >= 3, DEADLINE_S, "the third")
        assert told(endpoint) == [f"{RUN}:p-{number}:open" for number in (1, 2, 3)]


def test_a_dead_or_slow_endpoint_delays_no_other_and_gets_all_later(tmp_path: Path) -> None:
    store = MemoryStore()
    with http_endpoint() as good, http_endpoint() as bad:
        bad.status = 503
        channels = [webhook(bad), webhook(good), Webhook(f"http://127.0.0.1:{closed_port()}", BASE)]
        with running(store, channels, tmp_path) as notifier:
            begun = time.monotonic()
            store.append(RUN, [records.started(), proposed(2, "p-1"), proposed(3, "p-2")])
            wait_until(lambda: len(told(good)) == 2, DEADLINE_S, "the good one's notices")
            wait_until(lambda: len(bad.posts) >= 2, DEADLINE_S, "a second try")
            assert time.monotonic() - begun < 10.0
            first, second, third = notifier.state().channels
            assert "503" in first.error
            assert first.failing_since is not None
            assert first.pending == third.pending == 2
            assert (second.pending, second.error) == (0, "")
            bad.status = 200
            num_before = len(bad.posts)
            wait_until(lambda: len(bad.posts) >= num_before + 2, DEADLINE_S, "both after all")
        assert told(bad)[-2:] == [f"{RUN}:p-1:open", f"{RUN}:p-2:open"]


def test_what_waits_survives_a_restart(tmp_path: Path) -> None:
    store = MemoryStore()
    with http_endpoint() as endpoint:
        endpoint.status = 500
        with running(store, [webhook(endpoint)], tmp_path):
            store.append(RUN, [records.started(), proposed(2, "p-1")])
            wait_until(lambda: bool(endpoint.posts), DEADLINE_S, "a try")
        endpoint.status = 200
        # The store has forgotten it meanwhile
        with running(MemoryStore(), [webhook(endpoint)], tmp_path) as notifier:
            wait_until(
                lambda: notifier.state().channels[0].delivered == 1, DEADLINE_S, "its delivery"
            )
    assert set(told(endpoint)) == {f"{RUN}:p-1:open"}


def test_bad_entries_block_nothing(
    store: LiveStore, plant: Callable[[str, int, bytes], None], tmp_path: Path
) -> None:
    with http_endpoint() as endpoint, running(store, [webhook(endpoint)], tmp_path):
        store.append(RUN, [records.started()])
        plant(RUN, 2, b"\xc1garbage")
        store.append(RUN, [proposed(3, "p-1")])
        wait_until(lambda: bool(endpoint.posts), DEADLINE_S, "the notice behind it")


def test_entries_that_were_gone_are_counted(tmp_path: Path) -> None:
    store = MemoryStore()
    store.append(RUN, [records.started()])
    first = make(store, [], tmp_path)
    first.load()
    assert first.read_once() == 1
    store.append(RUN, [records.step(seq) for seq in range(2, JOURNAL_TAIL + 100)])
    store.acknowledge(RUN, JOURNAL_TAIL + 99)
    while first.read_once():
        pass
    assert first.state().missed == 98


class Flaky(MemoryStore):
    """Away until told otherwise."""

    is_away = True

    def list_journals(self) -> dict[str, tuple[int, int]]:
        if self.is_away:
            raise LiveStoreDown("the live store is away")
        return super().list_journals()


def test_it_waits_for_a_live_store_that_is_away(tmp_path: Path) -> None:
    store = Flaky()
    store.append(RUN, [records.started(), proposed(2, "p-1")])
    with http_endpoint() as endpoint, running(store, [webhook(endpoint)], tmp_path):
        store.is_away = False
        wait_until(lambda: bool(endpoint.posts), DEADLINE_S, "the notice")


def test_of_two_notifiers_of_a_home_one_waits_and_takes_over(tmp_path: Path) -> None:
    store = MemoryStore()
    with http_endpoint() as endpoint:
        with running(store, [webhook(endpoint)], tmp_path):
            store.append(RUN, [records.started(), proposed(2, "p-1")])
            wait_until(lambda: bool(endpoint.posts), DEADLINE_S, "the first one's work")
            stop = threading.Event()
            second = make(store, [webhook(endpoint)], tmp_path, stop)
            waiting = threading.Thread(target=second.run_forever, daemon=True)
            waiting.start()
        store.append(RUN, [proposed(3, "p-2")])
        wait_until(lambda: len(endpoint.posts) == 2, DEADLINE_S, "the second one's work")
        stop.set()
        waiting.join(15)
    assert not waiting.is_alive()


def test_a_file_that_is_broken_is_named(tmp_path: Path) -> None:
    (tmp_path / "notifier.bin").write_bytes(b"\xc1")
    with pytest.raises(UserError, match=r"notifier\.bin cannot be read.*remove it"):
        make(MemoryStore(), [], tmp_path).load()


def test_a_killed_notifier_tells_the_rest(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process itself, SIGKILLed while its endpoint is down: nothing is lost."""
    from storage.live.redis_store import RedisStore

    store = RedisStore.for_service(redis_server.url)
    with http_endpoint() as endpoint:
        endpoint.status = 500
        environment = {
            **os.environ,
            "COUNTERPOISE_HOME": str(tmp_path),
            "COUNTERPOISE_REDIS_URL": redis_server.url,
            "COUNTERPOISE_NOTIFY_WEBHOOKS": endpoint.url(),
        }

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [sys.executable, "-m", "counterpoise", "notifier"], env=environment
            )

        process = start()
        try:
            wait_until(lambda: store.get_notifier() is not None, DEADLINE_S, "its first word")
            store.append(RUN, [records.started(), proposed(2, "p-1")])
            wait_until(lambda: bool(endpoint.posts), DEADLINE_S, "a try")
            process.send_signal(signal.SIGKILL)
            process.wait(10)
            store.append(RUN, [proposed(3, "p-2")])
            endpoint.status = 200
            endpoint.posts.clear()
            process = start()
            wait_until(lambda: len(endpoint.posts) == 2, DEADLINE_S, "both")
            assert told(endpoint) == [f"{RUN}:p-1:open", f"{RUN}:p-2:open"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(15) == 0
        finally:
            process.kill()
            process.wait(10)
            store.close()
