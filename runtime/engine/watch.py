"""Waiting that ends when the generation does: the abort flag is looked at in every wait.

A dead peer shows as an error on its ring neighbours only; everyone else just waits. So no rank
judges by itself: it leaves when the flag is raised, and a rank whose collective failed waits for
the flag too. No library error leaves this module.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from runtime.errors import GenerationAborted

_SLICE_S = 0.03
_SLICE = timedelta(seconds=_SLICE_S)


class Work(Protocol):
    """What a process group returns for an operation under way."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class Watch:
    """One rank's view of the abort flag, with the phase it is in and the time it has waited.

    phase: "compute", "collective", "commit", "move" or "idle"; read by the heartbeat from another
        thread, to tell a hung rank from the ranks that wait for it.
    waited_s: seconds spent waiting for peers since the caller last reset it.
    """

    def __init__(
        self, abort: threading.Event, *, abort_deadline_s: float, streamed: bool = False
    ) -> None:
        self._abort = abort
        self._abort_deadline_s = abort_deadline_s
        self.streamed = streamed
        self.phase = "idle"
        self.waited_s = 0.0

    def check(self) -> None:
        """Raises GenerationAborted if the flag is up."""
        if self._abort.is_set():
            raise GenerationAborted("the generation was aborted")

    def pause(self, seconds: float) -> None:
        """Sleep, but not past an abort."""
        if self._abort.wait(seconds):
            raise GenerationAborted("the generation was aborted")

    def wait(self, work: Work, *, on_host: bool = False) -> None:
        """Wait until `work` is done.

        on_host: with a streamed backend, wait for the result on the host instead of only ordering
            the device stream after it.

        Raises:
            GenerationAborted: the flag was raised, or a peer is gone.
        """
        if self.streamed and not on_host:
            work.wait()
            return
        phase = self.phase
        if phase == "compute":
            self.phase = "collective"
        started = time.perf_counter()
        while True:
            try:
                if self.streamed and not work.is_completed():
                    self.pause(0.001)
                    continue
                work.wait(_SLICE)
                break
            except RuntimeError as error:
                if self._abort.is_set():
                    raise GenerationAborted("the generation was aborted") from error
                if work.is_completed():
                    self._confirm(work)
                    break
        self.waited_s += time.perf_counter() - started
        self.phase = phase

    def _confirm(self, work: Work) -> None:
        """The slice ended just as the work completed: find out whether it succeeded."""
        try:
            work.wait(_SLICE)
        except RuntimeError as error:
            self.peer_lost(error)

    def wait_messages(self, works: Sequence[Work]) -> None:
        """Wait until sends and receives are done.

        On gloo a wait for a message that runs out of time closes the connections of its group, so
        it cannot be sliced: a thread waits for all of it, and an abort leaves that thread behind.

        Raises:
            GenerationAborted: the flag was raised, or a peer is gone.
        """
        if self.streamed:
            for work in works:
                self.wait(work, on_host=True)
            return
        if not works:
            return
        done = threading.Event()
        failure: list[RuntimeError] = []

        def wait_for_all() -> None:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                failure.append(error)
            done.set()

        threading.Thread(target=wait_for_all, name="messages", daemon=True).start()
        self.wait_event(done)
        if failure:
            self.peer_lost(failure[0])

    def wait_event(self, event: threading.Event) -> None:
        """Wait until `event` is set by a local thread; raises GenerationAborted on abort."""
        while not event.wait(0.02):
            self.check()
        self.check()

    def peer_lost(self, error: BaseException) -> None:
        """A collective failed: wait for the abort that must follow, then raise it.

        Raises:
            GenerationAborted: always.
        """
        if self._abort.wait(self._abort_deadline_s):
            raise GenerationAborted("the generation was aborted") from error
        raise GenerationAborted(
            f"a collective failed and no abort came within {self._abort_deadline_s:g} s: {error}"
        ) from error
