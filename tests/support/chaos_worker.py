"""A worker process whose fail points a test sets while it runs, through files in a folder."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from runtime.engine.fail_points import Point

DEADLINE_S = 60.0


class Traps:
    """The test's side: which worker shall be stopped where."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    @property
    def entry(self) -> Callable[..., None]:
        """For `LocalRun`."""
        return partial(worker_main, self._folder)

    def set(self, gpu: str, point: Point, action: str) -> None:
        """At its next pass of `point`: "kill", "hang" for good, or "hold" until `release`."""
        fresh = self._folder / "fresh"
        fresh.write_text(action)
        fresh.rename(_file(self._folder, gpu, point))

    def fired(self, gpu: str, point: Point) -> bool:
        return not _file(self._folder, gpu, point).exists()

    def release(self, gpu: str) -> None:
        """Let a worker that is held leave its generation."""
        (self._folder / f"{_name(gpu)}.release").touch()


class _FilePoints:
    """The worker's side."""

    def __init__(self, folder: Path, gpu: str) -> None:
        self._folder, self._gpu = folder, gpu

    def at(self, point: Point) -> None:
        path = _file(self._folder, self._gpu, point)
        try:
            action = path.read_text()
        except FileNotFoundError:
            return
        path.unlink()
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "hang":
            threading.Event().wait()
        self._hold()

    def _hold(self) -> None:
        # Only the process itself imports what brings torch.
        from runtime.errors import GenerationAborted

        release, deadline = self._folder / f"{_name(self._gpu)}.release", time.monotonic()
        while not release.exists() and time.monotonic() < deadline + DEADLINE_S:
            time.sleep(0.005)
        release.unlink()
        raise GenerationAborted("held")


def _name(gpu: str) -> str:
    return gpu.replace("/", "_")


def _file(folder: Path, gpu: str, point: Point) -> Path:
    return folder / f"{_name(gpu)}@{point}"


def worker_main(
    folder: Path, config_json: bytes, gpu: str, store: tuple[str, int], connection: Connection
) -> None:
    from runtime.control.worker import worker_main as run

    run(config_json, gpu, store, connection, _FilePoints(folder, gpu))
