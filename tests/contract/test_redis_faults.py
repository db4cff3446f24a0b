"""A Redis that goes away, comes back, forgets, hangs, refuses or holds something else."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import redis

from storage.live.port import LiveStoreDown
from storage.live.redis_store import RedisStore
from storage.records import RecordError
from tests.contract import records
from tests.contract.records import RUN
from tests.support.services import RedisServer, wait_until

BOTH = pytest.mark.parametrize("redis_server", ["embedded", "system"], indirect=True)


def seconds_until_down(store: RedisStore) -> float:
    begun = time.monotonic()
    with pytest.raises(LiveStoreDown):
        store.list_runs()
    return time.monotonic() - begun


@BOTH
def test_a_dead_server_is_known_quickly_and_comes_back(redis_server: RedisServer) -> None:
    ui, service = RedisStore.for_ui(redis_server.url), RedisStore.for_service(redis_server.url)
    state, entries = records.run_state(), records.journal(300)
    ui.put_run(state)
    service.append(RUN, entries)
    redis_server.kill()
    assert seconds_until_down(ui) < 1.0
    assert seconds_until_down(service) < 4.0
    redis_server.restart()
    assert ui.get_run(RUN) == state
    assert service.read_journal(RUN, 0, count=300) == entries
    ui.close()
    service.close()


def test_a_hanging_server_is_known_quickly(redis_server: RedisServer) -> None:
    ui = RedisStore.for_ui(redis_server.url)
    ui.ping()
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        assert seconds_until_down(ui) < 2.0
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    wait_until(lambda: ui.list_runs() == [], 5, "an answer")
    ui.close()


def test_a_wiped_server_is_noticed_and_filled_again(redis_server: RedisServer) -> None:
    store = RedisStore.for_service(redis_server.url)
    entries = records.journal(900)
    store.append(RUN, entries[:600], after=0)
    client = redis.Redis.from_url(redis_server.url)
    client.flushall()
    # The writer's connection never broke; what it believes of the store tells it all the same
    held = store.append(RUN, entries[600:], after=600)
    assert held == 0
    assert store.append(RUN, entries[held:], after=held) == 900
    assert store.read_journal(RUN, 0, count=1000) == entries
    # Scripts are forgotten by a restart, not only data
    client.script_flush()
    client.close()
    assert store.append(RUN, entries, after=900) == 900
    store.close()


def test_a_short_interruption_is_ridden_out_by_a_service(redis_server: RedisServer) -> None:
    store = RedisStore.for_service(redis_server.url)
    store.ping()
    client = redis.Redis.from_url(redis_server.url)
    client.client_kill_filter(_type="normal")
    client.close()
    store.append(RUN, [records.started()])
    assert store.last_seq(RUN) == 1
    store.close()


def test_a_lost_reply_does_not_double_anything(redis_server: RedisServer) -> None:
    """The proxy passes each request on and swallows the reply, so that the client sends again."""
    with LossyProxy(redis_server.socket) as proxy:
        store = RedisStore(proxy.url, timeout_s=1.0, num_retries=3)
        store.append(RUN, records.journal(5))
        proxy.lose(1)
        assert store.append(RUN, records.journal(9)) == 9
        proxy.lose(1)
        result = store.submit(RUN, records.stop(), now=1.0)
        assert result.ok
        proxy.lose(1)
        store.put_racks([records.rack()])
        proxy.lose(1)
        assert store.put_proposal(records.proposal())
        assert len(store.read_journal(RUN, 0)) == 9
        assert len(store.read_commands(RUN, "")) == 1
        assert len(store.rack_history(RUN, "rack-0")) == 1
        store.close()


def test_a_password_does_not_get_into_a_message(redis_server: RedisServer) -> None:
    client = redis.Redis.from_url(redis_server.url)
    client.config_set("requirepass", "s3cret")
    for url in (f"{redis_server.url}?password=wr0ng", "redis://:s3cret@127.0.0.1:1/0"):
        store = RedisStore.for_ui(url)
        with pytest.raises(LiveStoreDown) as caught:
            store.ping()
        assert "s3cret" not in str(caught.value)
        assert "wr0ng" not in str(caught.value)
        assert "COUNTERPOISE_REDIS_URL" in str(caught.value)
        store.close()
    store = RedisStore.for_ui(f"{redis_server.url}?password=s3cret")
    store.ping()
    store.close()
    client.close()


def test_bad_values_are_record_errors_and_spare_the_others(redis_server: RedisServer) -> None:
    store = RedisStore.for_ui(redis_server.url)
    client = redis.Redis.from_url(redis_server.url)
    for number in range(3):
        store.put_run(records.run_state(run=f"run-{number}"))
        store.put_racks([records.rack(f"rack-{number}")])
        store.put_proposal(records.proposal(id=f"p-{number}"))
        store.submit(RUN, records.stop(f"s-{number}"), now=1.0)
    client.hset("cp:run:run-1:state", "body", b"\xc1")
    client.hset("cp:run:run-1:racks", "rack-1", b"\xc1")
    client.hset("cp:run:run-1:proposal:p-1", "state", "odd")
    client.hset("cp:run:run-1:proposal:p-1", "revision", "7")
    client.xadd("cp:run:run-1:commands", {"other": "field"})
    with pytest.raises(RecordError):
        store.get_run("run-1")
    assert {state.run for state in store.list_runs()} == {"run-0", "run-2"}
    assert set(store.get_racks(RUN)) == {"rack-0", "rack-2"}
    with pytest.raises(RecordError):
        store.get_proposal(RUN, "p-1")
    assert {proposal.id for proposal in store.list_proposals(RUN)} == {"p-0", "p-2"}
    commands = [command for _, command in store.read_commands(RUN, "")]
    assert [command.id if command else None for command in commands] == ["s-0", "s-1", "s-2", None]
    client.delete("cp:run:run-1:racks")
    client.set("cp:run:run-1:racks", "text")
    with pytest.raises(RecordError, match="something else"):
        store.get_racks(RUN)
    client.close()
    store.close()


class LossyProxy:
    """A Unix socket in front of Redis that can swallow replies and drop the connection."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._path = target.with_name("lossy.sock")
        self._num_to_lose = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        return f"unix://{self._path}"

    def lose(self, num_replies: int) -> None:
        self._num_to_lose = num_replies

    def __enter__(self) -> LossyProxy:
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server:
            server.connect(str(self._target))
            while request := client.recv(1 << 20):
                server.sendall(request)
                reply = server.recv(1 << 20)
                if self._num_to_lose > 0:
                    self._num_to_lose -= 1
                    return
                client.sendall(reply)
