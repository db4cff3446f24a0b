"""The test servers themselves: what the fault tests rely on must hold."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa

from tests.support.services import RedisServer, wait_until

EVERY_REDIS = pytest.mark.parametrize("redis_server", ["embedded", "system"], indirect=True)


@EVERY_REDIS
def test_killed_redis_comes_back_with_its_data(redis_server: RedisServer) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        client.set("generation", 7)
    first = redis_server.pid

    redis_server.kill()
    with (
        redis.Redis.from_url(redis_server.url, retry=None) as client,
        pytest.raises(redis.ConnectionError),
    ):
        client.ping()

    redis_server.restart()
    assert redis_server.pid != first
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.get("generation") == b"7"


@EVERY_REDIS
def test_redis_listens_on_no_port(redis_server: RedisServer) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.config_get("port") == {"port": "0"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_redis_dies_with_a_killed_test_process() -> None:
    script = (
        "import sys\n"
        "from tests.support.services import running_redis\n"
        "with running_redis() as server:\n"
        "    print(server.pid, server.folder, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        pid, folder = process.stdout.readline().split()
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not _alive(int(pid)), 10.0, "the server's end")
    shutil.rmtree(folder)


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_each_test_gets_an_empty_database(postgres_url: str, postgres_server: sa.URL) -> None:
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE runs (id integer)")
        assert sa.inspect(connection).get_table_names() == ["runs"]
        assert connection.exec_driver_sql("SHOW server_encoding").scalar() == "UTF8"
    assert sa.make_url(postgres_url).database != postgres_server.database
    engine.dispose()


def test_postgres_listens_on_no_port(postgres_url: str) -> None:
    if "COUNTERPOISE_TEST_DATABASE_URL" in os.environ:
        pytest.skip("not our server")
    engine = sa.create_engine(postgres_url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW listen_addresses").scalar() == ""
    engine.dispose()
