"""A whole run inside one process and its workers: controller and agent in threads, no store needed.

Benchmarks and tests drive it; `counterpoise up` runs the same classes as processes of their own.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from runtime.config import Config
from runtime.control.agent import Agent
from runtime.control.controller import Controller
from runtime.control.instructions import Finish
from runtime.control.telemetry import HostTelemetry
from runtime.control.worker_entry import worker_main
from runtime.engine.resume import AFRESH, Beginning
from runtime.errors import CounterpoiseError
from storage.commands import Command
from storage.live.port import LiveStore

# How often a wait looks whether the controller is still there.
LOOK_S = 0.5


class LocalRun:
    """Context manager around one run on this machine.

    Args:
        config: all racks must be on one host.
        home: folder for the journal.
        store: live store to publish to, or None.
        begin: the checkpoint to go on from, as `runtime.engine.resume.find_start` has it.
        entry: where a worker process begins.
    """

    def __init__(
        self,
        config: Config,
        *,
        home: Path,
        run: str = "local",
        store: LiveStore | None = None,
        begin: Beginning = AFRESH,
        entry: Callable[..., None] = worker_main,
    ) -> None:
        self.run = run
        self.entries: list[Any] = []
        self._arrived = threading.Condition()
        key = secrets.token_hex(16).encode()
        self.controller = Controller(
            config, run=run, home=home, store=store, key=key, observer=self._observe, begin=begin
        )
        host = config.cluster.racks[0].host
        self._stop = threading.Event()
        self.telemetry = HostTelemetry(config, host=host, store=store, home=home)
        self.agent = Agent(
            config,
            host=host,
            address=self.controller.address,
            key=key,
            telemetry=self.telemetry,
            stop=self._stop,
            entry=entry,
        )
        self._finish: Finish | None = None
        self._threads = [
            threading.Thread(target=self._control, name="controller", daemon=True),
            threading.Thread(target=self.agent.run, name="agent", daemon=True),
            threading.Thread(
                target=self.telemetry.run_forever,
                args=(self._stop, self.agent.speed_changed),
                name="telemetry",
                daemon=True,
            ),
        ]

    def __enter__(self) -> LocalRun:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.controller.ask_stop("the context ended")
        self._threads[0].join(timeout=15.0)
        self._stop.set()
        self.agent.wake()
        for thread in self._threads[1:]:
            thread.join(timeout=10.0)

    def submit(self, command: Command) -> None:
        self.controller.submit(command)

    def join(self, deadline_s: float) -> Finish:
        """Wait for the run to end by itself.

        Raises:
            CounterpoiseError: it did not within `deadline_s`.
        """
        self._threads[0].join(timeout=deadline_s)
        if self._finish is None:
            raise CounterpoiseError(f"the run did not end within {deadline_s:g} s")
        return self._finish

    def wait_for(self, wanted: Callable[[Any], bool], deadline_s: float, after: int = 0) -> Any:
        """The first journal entry or command answer (from index `after` on) that `wanted` accepts.

        Raises:
            CounterpoiseError: none came within `deadline_s`, or none can come any more.
        """
        deadline = time.monotonic() + deadline_s
        with self._arrived:
            while True:
                for entry in self.entries[after:]:
                    if wanted(entry):
                        return entry
                after = len(self.entries)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CounterpoiseError(
                        f"nothing of the kind within {deadline_s:g} s; last: {self.entries[-3:]}"
                    )
                if not self._threads[0].is_alive():
                    raise CounterpoiseError(f"the controller ended; last: {self.entries[-3:]}")
                self._arrived.wait(min(left, LOOK_S))

    def _observe(self, entry: object) -> None:
        with self._arrived:
            self.entries.append(entry)
            self._arrived.notify_all()

    def _control(self) -> None:
        self._finish = self.controller.run()
