"""One suite, every backend: live stores and histories to run the contracts over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from sqlalchemy import Engine

from storage.history.database import open_history
from storage.history.schema import upgrade
from storage.live.memory import MemoryStore
from storage.live.port import LiveStore
from storage.live.redis_store import RedisStore
from tests.conftest import missing
from tests.support import services

LIVE_BACKENDS = [
    "memory",
    pytest.param("embedded", marks=pytest.mark.redis_server),
    pytest.param("system", marks=pytest.mark.redis_server),
]


@pytest.fixture(scope="session")
def server_of() -> Iterator[Callable[[str], services.RedisServer]]:
    """The session's server of a kind, started when first asked for."""
    running: dict[str, services.RedisServer] = {}
    with ExitStack() as stack:

        def find(kind: str) -> services.RedisServer:
            if kind not in running:
                try:
                    running[kind] = stack.enter_context(services.running_redis(kind))
                except services.MissingServiceError as error:
                    missing(error)
            return running[kind]

        yield find


@pytest.fixture(params=LIVE_BACKENDS)
def store(
    request: pytest.FixtureRequest, server_of: Callable[[str], services.RedisServer]
) -> Iterator[LiveStore]:
    """An empty live store of each kind."""
    if request.param == "memory":
        yield MemoryStore()
        return
    url = server_of(request.param).url
    client = redis.Redis.from_url(url)
    client.flushall()
    client.close()
    backend = RedisStore.for_service(url)
    yield backend
    backend.close()


@pytest.fixture
def plant(store: LiveStore) -> Callable[[str, int, bytes], None]:
    """Puts raw bytes into the journal as entry `seq` of a run, as a broken writer would."""

    def into_memory(run: str, seq: int, body: bytes) -> None:
        assert isinstance(store, MemoryStore)
        store._run(run).journal[seq] = body

    def into_redis(run: str, seq: int, body: bytes) -> None:
        assert isinstance(store, RedisStore)
        store._link.execute("XADD", f"cp:run:{run}:journal", f"{seq}-0", "d", body)
        store._link.execute("SADD", "cp:journals", run)

    return into_memory if isinstance(store, MemoryStore) else into_redis


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'history.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    """A history with its tables."""
    opened = open_history(empty_url)
    upgrade(opened)
    yield opened
    opened.dispose()
