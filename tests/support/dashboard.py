"""The dashboard as its own process, for browser tests: start, kill, start on the same port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from tests.support.services import dies_with_us, stop_process, wait_until

START_DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Dashboard:
    """One Streamlit server. home: of its stores. more: variables of its environment. Start it from
    the main thread."""

    def __init__(self, home: Path, redis_url: str, more: Mapping[str, str] | None = None) -> None:
        self.home = home
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = home / "dashboard.log"
        self._env = os.environ | {
            "COUNTERPOISE_HOME": str(home),
            "COUNTERPOISE_REDIS_URL": redis_url,
            "PYTHONPATH": str(ROOT),
            **(more or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return once it answers."""
        command = [*dies_with_us("KILL"), sys.executable, "-m", "counterpoise", "app"]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                env=self._env,
                cwd=self.home,
                stdout=output,
                stderr=output,
            )
        wait_until(self._answers, START_DEADLINE_S, "the dashboard's first answer")

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            stop_process(self._process, signal.SIGKILL)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the dashboard ended: {self.log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False
