"""The kernel log as a source: lines from any feed, through one reader."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from runtime.health.catalogue import Catalogue
from runtime.health.kernel_log import KernelLogReader
from runtime.health.observation import Identity, Observation
from runtime.health.sources.port import SourceState

# How long the rest of a wrapped line may take to come.
_WRAP_S = 0.1


class LineFeed(Protocol):
    """Where lines come from. `lines` waits at most about `timeout_s`.

    Raises:
        FileNotFoundError, PermissionError, OSError: from both; the feed is closed and may be
            opened again.
    """

    name: str

    def open(self) -> None: ...

    def lines(self, timeout_s: float) -> list[str]: ...

    def close(self) -> None: ...


class KernelLogSource:
    """Follows a kernel log. `clock` dates observations: the log's own times may count from boot."""

    waits = True

    def __init__(
        self, feed: LineFeed, catalogue: Catalogue, clock: Callable[[], float] = time.time
    ) -> None:
        self.name = feed.name
        self.state = SourceState(feed.name, "missing", "not opened yet")
        self._feed = feed
        self._clock = clock
        year = datetime.datetime.fromtimestamp(clock(), datetime.UTC).year
        self.reader = KernelLogReader(catalogue, year)

    def open(self) -> SourceState:
        try:
            self._feed.open()
        except OSError as error:
            return self._failed(error)
        self.state = SourceState(self.name, "watching")
        return self.state

    def poll(self, timeout_s: float) -> Sequence[Observation]:
        found: list[Observation] = []
        try:
            while lines := self._feed.lines(timeout_s):
                for line in lines:
                    found += self.reader.feed(line)
                if not self.reader.is_holding:
                    break
                timeout_s = _WRAP_S
        except OSError as error:
            self._failed(error)
        else:
            # The log pauses: nothing goes on with what is held.
            found += self.reader.flush()
        now = self._clock()
        return [msgspec.structs.replace(each, at=now, line=None) for each in found]

    def identities(self) -> tuple[Sequence[Identity], bool]:
        return list(self.reader.identities.values()), False

    def close(self) -> None:
        self._feed.close()

    def _failed(self, error: OSError) -> SourceState:
        self._feed.close()
        self.state = _state_of(self.name, error)
        return self.state


def _state_of(name: str, error: OSError) -> SourceState:
    what = f"{error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        return SourceState(name, "missing", f"{error.filename or name}: {what}")
    if isinstance(error, PermissionError):
        fix = "run the agent as root, or allow it with: sysctl kernel.dmesg_restrict=0"
        return SourceState(name, "denied", f"{error.filename or name}: {what}; {fix}")
    return SourceState(name, "failing", what)
