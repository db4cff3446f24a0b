"""`counterpoise up` as a person runs it: its own process, told by its lines, ended by Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.services import dies_with_us, stop_process, wait_until

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 90.0
STOP_DEADLINE_S = 40.0


class Up:
    """One `up` over a home of its own. Start it from the main thread."""

    def __init__(
        self, home: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.home = home
        self.log = home.parent / f"{home.name}-up.log"
        self._arguments = arguments
        self.environment = {
            k: v for k, v in os.environ.items() if not k.startswith("COUNTERPOISE_")
        } | {
            "COUNTERPOISE_HOME": str(home),
            "PYTHONPATH": str(ROOT),
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [*dies_with_us("TERM"), sys.executable, "-m", "counterpoise", "up"]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *self._arguments],
                env=self.environment,
                cwd=self.home.parent,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def await_line(self, pattern: str, deadline_s: float = START_DEADLINE_S) -> re.Match[str]:
        """The first match of `pattern` in what it printed."""

        def look() -> re.Match[str] | None:
            assert self._process is not None
            found = re.search(pattern, self.said())
            if found is None and self._process.poll() is not None:
                raise RuntimeError(f"up ended with {self._process.returncode}: {self.said()}")
            return found

        try:
            wait_until(lambda: look() is not None, deadline_s, f"a line like {pattern!r}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it said: {self.said()}") from error
        found = look()
        assert found is not None
        return found

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(timeout=STOP_DEADLINE_S)

    def kill_hard(self) -> None:
        if self._process is not None and self._process.poll() is None:
            stop_process(self._process, signal.SIGKILL)

    def cli(self, *arguments: str) -> Any:
        """Run a command of the shell with --json; its decoded output."""
        done = subprocess.run(
            [sys.executable, "-m", "counterpoise", *arguments, "--json"],
            env=self.environment,
            cwd=self.home.parent,
            capture_output=True,
            timeout=60,
            check=False,
        )
        try:
            return json.loads(done.stdout)
        except ValueError as error:
            raise RuntimeError(f"{arguments}: {done.stdout!r} {done.stderr!r}") from error

    def processes(self) -> dict[int, str]:
        """Every living process of this home: pid -> command line (the test itself left out)."""
        marker = f"COUNTERPOISE_HOME={self.home}".encode()
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = line.decode(errors="replace")
            except OSError:
                continue
        return found
