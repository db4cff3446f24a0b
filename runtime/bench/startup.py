"""Startup: seconds from `counterpoise up` to the first committed step and to a loaded dashboard.

The real command in a home of its own, as a person would start it; then Ctrl-C, and a look at what
is left running.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from runtime.bench.benchmark import Benchmark, Figures, Say, Target
from runtime.bench.leftover import processes_of
from runtime.bench.page import open_browser, wait_until_rendered
from runtime.control.supervisor import dashboard_answers, free_port
from runtime.errors import CounterpoiseError
from storage.history.queries import History
from storage.live.port import LiveStoreDown
from storage.live.redis_store import RedisStore
from storage.settings import DATABASE_VARIABLE, HOME_VARIABLE, REDIS_VARIABLE, Settings

DEADLINE_S = 35.0
END_DEADLINE_S = 15.0
LOOK_S = 0.05


def measure(say: Say) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="counterpoise-") as folder, open_browser() as page:
        home, port = Path(folder) / "home", free_port()
        up = _Up(port, _environment(home), Path(folder) / "up.log")
        try:
            health_s = up.wait(lambda: dashboard_answers(port))
            say(f"dashboard answers after {health_s:.1f} s")
            if page is not None:
                wait_until_rendered(page, f"http://127.0.0.1:{port}", DEADLINE_S)
            dashboard_s = up.elapsed() if page is not None else health_s
            up.wait(lambda: up.first_commit_s > 0)
            first_commit_s = up.first_commit_s
            say(f"page rendered {dashboard_s:.1f} s, first step {first_commit_s:.1f} s; now Ctrl-C")
            stop_s, exit_code = up.interrupt()
        finally:
            up.end()
        left_over = processes_of(HOME_VARIABLE, str(home))
        recorded_as = _recorded_as(Settings.from_env(_environment(home)))
    return {
        "first_commit_s": round(first_commit_s, 2),
        "dashboard_s": round(dashboard_s, 2),
        "dashboard_measured_by": "browser" if page is not None else "health endpoint",
        "health_s": round(health_s, 2),
        "stop_s": round(stop_s, 2),
        "exit_code": exit_code,
        "recorded_as": recorded_as,
        "leftover_processes": len(left_over),
        "leftover": left_over,
    }


def _environment(home: Path) -> dict[str, str]:
    """Ours, with a home of its own and no store of anybody else's."""
    environment = {**os.environ, HOME_VARIABLE: str(home)}
    # With the last one set, every start would compile anew.
    for name in (REDIS_VARIABLE, DATABASE_VARIABLE, "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    return environment


def _recorded_as(settings: Settings) -> str:
    """Status of the run in the history once all is over; "" when there is none."""
    history = History.open(settings.database_url)
    try:
        return next((run.status for run in history.list_runs(limit=1)), "")
    finally:
        history.close()


class _Up:
    """One `counterpoise up`, watched from outside; a thread looks for its first commit."""

    def __init__(self, port: int, environment: dict[str, str], log: Path) -> None:
        self._log = log
        self._store = RedisStore.for_ui(Settings.from_env(environment).redis_url)
        self._ended = threading.Event()
        self.first_commit_s = 0.0
        with log.open("wb") as output:
            self._started = time.monotonic()
            # A group of its own: a Ctrl-C here must not reach it before we have looked.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "runtime.cli", "up", "--port", str(port)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._watcher = threading.Thread(target=self._watch_commits, daemon=True)
        self._watcher.start()

    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def wait(self, is_there: Callable[[], bool]) -> float:
        """Seconds since the start when `is_there` first says so.

        Raises:
            CounterpoiseError: it ended, or it was not within the deadline.
        """
        while not is_there():
            if self._process.poll() is not None or self.elapsed() > DEADLINE_S:
                words = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise CounterpoiseError(f"`up` did not come up in {self.elapsed():.0f} s:\n{words}")
            time.sleep(LOOK_S)
        return self.elapsed()

    def interrupt(self) -> tuple[float, int]:
        """Ctrl-C; returns the seconds it took to end, and its exit code.

        Raises:
            CounterpoiseError: it did not end within the deadline.
        """
        asked = time.monotonic()
        self._process.send_signal(signal.SIGINT)
        try:
            code = self._process.wait(timeout=END_DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise CounterpoiseError(f"`up` did not end in {END_DEADLINE_S:g} s") from error
        return time.monotonic() - asked, code

    def end(self) -> None:
        """End it whatever happened; one that does not listen takes its roles with it."""
        self._ended.set()
        self._process.terminate()
        try:
            self._process.wait(timeout=END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._watcher.join()
        self._store.close()

    def _watch_commits(self) -> None:
        while not self._ended.wait(LOOK_S) and not self.first_commit_s:
            with suppress(LiveStoreDown):
                if any(run.step > 0 for run in self._store.list_runs()):
                    self.first_commit_s = self.elapsed()


def targets(_: Figures) -> list[Target]:
    return [
        Target(figure="first_commit_s", at_most=20.0, why="from `up` on a set-up machine"),
        Target(figure="dashboard_s", at_most=15.0, why="from `up` to a loaded dashboard"),
        Target(figure="leftover_processes", at_most=0, why="nothing is left running"),
    ]


BENCHMARK = Benchmark(
    name="startup",
    summary="`counterpoise up` to the first committed step and to a loaded dashboard",
    measure=measure,
    targets=targets,
)
