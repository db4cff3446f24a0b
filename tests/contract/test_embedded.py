"""The embedded server: starts, refuses a second, survives what it should, leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.live.embedded import EmbeddedServer, EmbeddedServerError, find_binary
from storage.live.port import LiveStoreDown
from storage.live.redis_store import RedisStore
from storage.settings import Settings
from tests.conftest import missing
from tests.contract import records
from tests.contract.records import RUN
from tests.support.services import wait_until

ONLY_PARENT = """
import sys, signal
from storage.live.embedded import EmbeddedServer
from storage.settings import Settings
server = EmbeddedServer.from_settings(Settings.from_env())
server.start()
print(server.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    try:
        find_binary()
    except EmbeddedServerError as error:
        missing(error)
    return Settings.from_env({"COUNTERPOISE_HOME": str(tmp_path / "home with space")})


@pytest.fixture
def server(settings: Settings) -> Iterator[EmbeddedServer]:
    with EmbeddedServer.from_settings(settings) as started:
        yield started


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has waited for yet is gone, too
    state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    return state not in ("Z", "X")


def test_it_answers_on_a_private_socket_only(server: EmbeddedServer, settings: Settings) -> None:
    store = RedisStore.for_ui(settings.redis_url)
    store.ping()
    for name, value in (("port", b"0"), ("maxmemory-policy", b"noeviction"), ("save", b"")):
        assert store._link.execute("CONFIG", "GET", name)[1] == value
    store.close()
    assert stat.S_IMODE(settings.redis_socket.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.data_folder.stat().st_mode) == 0o700
    server.start()  # harmless while it runs
    pid = server.pid
    assert pid is not None
    server.stop()
    assert server.pid is None
    assert not is_alive(pid)
    server.stop()


def test_a_home_with_a_long_path_works(tmp_path: Path) -> None:
    settings = Settings.from_env({"COUNTERPOISE_HOME": str(tmp_path / ("long-" * 25))})
    folder = settings.redis_socket.parent
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with EmbeddedServer.from_settings(settings) as server:
            assert server.url == settings.redis_url
            RedisStore.for_ui(settings.redis_url).ping()
    finally:
        shutil.rmtree(folder)


def test_a_second_one_in_the_same_home_is_refused(
    server: EmbeddedServer, settings: Settings
) -> None:
    with pytest.raises(EmbeddedServerError, match="COUNTERPOISE_HOME"):
        EmbeddedServer.from_settings(settings).start()
    server.stop()
    with EmbeddedServer.from_settings(settings):
        pass


def test_kill_and_restart_keep_the_data(server: EmbeddedServer, settings: Settings) -> None:
    store = RedisStore.for_service(settings.redis_url)
    store.append(RUN, records.journal(50))
    server.kill()
    with pytest.raises(LiveStoreDown, match=r"redis\.sock"):
        RedisStore.for_ui(settings.redis_url).ping()
    server.start()
    assert store.last_seq(RUN) == 50
    server.restart()
    assert store.last_seq(RUN) == 50
    store.close()


def test_it_dies_with_a_killed_parent(settings: Settings) -> None:
    environment = os.environ | {"COUNTERPOISE_HOME": str(settings.home)}
    parent = subprocess.Popen(
        [sys.executable, "-c", ONLY_PARENT], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    wait_until(lambda: not is_alive(pid), 10, "the server's end")
    # The home is free again at once
    with EmbeddedServer.from_settings(settings) as server:
        assert server.pid != pid


def test_it_starts_from_the_main_thread_only(settings: Settings) -> None:
    errors: list[Exception] = []

    def start() -> None:
        try:
            EmbeddedServer.from_settings(settings).start()
        except EmbeddedServerError as error:
            errors.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(10)
    assert "thread" in str(errors[0])


def test_a_server_that_ends_at_once_shows_its_log(settings: Settings) -> None:
    (settings.home / "redis" / "appendonlydir").mkdir(parents=True)
    manifest = settings.home / "redis" / "appendonlydir" / "appendonly.aof.manifest"
    manifest.write_text("nonsense\n", encoding="utf-8")
    server = EmbeddedServer.from_settings(settings)
    with pytest.raises(EmbeddedServerError, match=r"(?s)ended with code.*AOF"):
        server.start()
    assert server.pid is None


def test_without_a_binary_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("storage.live.embedded._carried_binary", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedServerError, match="COUNTERPOISE_REDIS_URL"):
        find_binary()
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.14 sha=0'\n", encoding="utf-8")
    old.chmod(0o700)
    with pytest.raises(EmbeddedServerError, match=r"7\.0 or later"):
        find_binary()
