"""`counterpoise up`: one process that starts all others on this machine, restarts what may be
restarted, and leaves nothing running when it ends. It takes no part in training."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from runtime.control.channel import CONTROL_KEY, mint_control_key
from runtime.control.lineage import PARENT
from runtime.errors import UserError
from storage.live.acl import without_others
from storage.settings import HOME_VARIABLE, Settings

RESTART_S = (0.5, 1.0, 2.0, 5.0)
_LOG = logging.getLogger(__name__)


class Role:
    """One child process. restarts: it is started again when it dies."""

    def __init__(self, name: str, arguments: Sequence[str], *, restarts: bool, log: Path) -> None:
        self.name = name
        self.arguments = list(arguments)
        self.restarts = restarts
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.deaths = 0
        self.next_start = 0.0

    def start(self, environment: dict[str, str]) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "counterpoise", *self.arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def code(self) -> int | None:
        return self.process.poll() if self.process is not None else None

    def last_words(self) -> str:
        """Last line of its log, for messages."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:300] if lines else ""


class Supervisor:
    """Starts roles, looks after them, ends them in order.

    Args:
        settings: addresses. say: prints one line for the person at the terminal.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._say = say
        self._logs = settings.home / "logs"
        self._logs.mkdir(mode=0o700, exist_ok=True)
        self._roles: dict[str, Role] = {}
        self._environment = {
            **os.environ,
            HOME_VARIABLE: str(settings.home),
            CONTROL_KEY: os.environ.get(CONTROL_KEY) or mint_control_key(),
            PARENT: str(os.getpid()),
        }
        # Set, it would make every start compile anew.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def start(self, name: str, arguments: Sequence[str], *, restarts: bool) -> None:
        role = Role(name, arguments, restarts=restarts, log=self._logs / f"{name}.log")
        role.log.write_bytes(b"")
        role.start(without_others(self._environment, name))
        self._roles[name] = role

    def check(self, now: float) -> list[Role]:
        """Restart what may be restarted; returns the roles that died and may not."""
        gone = []
        for role in self._roles.values():
            if role.alive:
                continue
            if not role.restarts:
                gone.append(role)
            elif role.code == 0:
                continue
            elif role.next_start == 0.0:
                pause = RESTART_S[min(role.deaths, len(RESTART_S) - 1)]
                role.deaths, role.next_start = role.deaths + 1, now + pause
                self._say(
                    f"{role.name} ended with {role.code}; starting it again in {pause:g} s "
                    f"(log: {role.log})"
                )
            elif now >= role.next_start:
                role.next_start = 0.0
                role.start(without_others(self._environment, role.name))
        return gone

    def ask_end(self, name: str) -> None:
        role = self._roles.get(name)
        if role is not None and role.process is not None and role.alive:
            role.process.send_signal(signal.SIGTERM)

    def end(self, name: str, deadline_s: float) -> None:
        """Ask a role to end and wait; kill it and its group past the deadline."""
        role = self._roles.pop(name, None)
        if role is None or role.process is None:
            return
        if role.alive:
            role.process.send_signal(signal.SIGTERM)
        try:
            role.process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            _LOG.warning("%s did not end in %.0f s and was killed", name, deadline_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(role.process.pid, signal.SIGKILL)
        role.process.wait()

    def wait_ended(self, name: str, deadline_s: float) -> int | None:
        """Exit code of a role once it has ended by itself, None past the deadline."""
        role = self._roles.get(name)
        if role is None or role.process is None:
            return None
        try:
            return role.process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            return None

    def end_all(self) -> None:
        for name in list(self._roles):
            self.end(name, 5.0)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def first_free_port(wanted: int | None, first: int = 8501, tries: int = 20) -> int:
    """The wanted port, or the first free one from `first` on.

    Raises:
        UserError: the wanted port is taken, or none is free.
    """
    for port in [wanted] if wanted is not None else range(first, first + tries):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    if wanted is not None:
        raise UserError(f"port {wanted} on 127.0.0.1 is taken; give another --port or none")
    raise UserError(f"ports {first} to {first + tries - 1} are all taken; name one with --port")


def dashboard_answers(port: int) -> bool:
    """Whether the dashboard on 127.0.0.1 serves pages."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/_stcore/health", timeout=1.0
        ) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


class StopAsked:
    """SIGINT and SIGTERM as a flag; a second one asks to hurry."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.hurry = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._arrived)

    def _arrived(self, *_: object) -> None:
        self.hurry = self.event.is_set()
        self.event.set()


def seconds_since(started: float) -> str:
    return f"{time.monotonic() - started:.1f} s"
