"""The port of a health source, and the clear word on one that is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from runtime.health.observation import Identity, Observation

SourceStatus = Literal["watching", "missing", "denied", "failing"]


class SourceState(NamedTuple):
    """missing: there is no such source here. denied: it is there, and we may not read it.
    failing: it worked or should work, and does not now; it is tried again. reason: for a person."""

    name: str
    status: SourceStatus
    reason: str = ""


class HealthSource(Protocol):
    """One source. Only one thread calls it. waits: `poll` itself waits until something is there;
    one that does not is asked once every poll_s.

    Contract: `open` never raises for what the outside does; it returns the state. `poll` waits at
    most about `timeout_s`, returns what was seen, and turns a failure into the state; the caller
    then calls `open` again some time later. `close` may be called in any state, more than once.
    """

    name: str
    state: SourceState
    waits: bool

    def open(self) -> SourceState:
        """Begin to watch; from now on, not from the past."""

    def poll(self, timeout_s: float) -> Sequence[Observation]:
        """What was seen since the last call; `gpu` as the source calls it."""

    def identities(self) -> tuple[Sequence[Identity], bool]:
        """Who sits where, as far as the source knows, and whether that is all of the host."""

    def close(self) -> None:
        """Let go of everything that `open` took."""
