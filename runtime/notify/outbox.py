"""What waits to be sent on one channel, and when it is tried again. Pure: time is passed in.

In order, one at a time, so that "opened" comes before "closed". Bounded: of too many, and of those
that nobody could be told in a day, the oldest go, and are counted.
"""

from __future__ import annotations

import msgspec

from runtime.notify.notice import Notice
from storage.notifier_state import ChannelState

MAX_PENDING = 1000
MAX_AGE_S = 24 * 3600.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
KEPT_ERROR = 300


class Outbox(msgspec.Struct, kw_only=True):
    """One channel's queue and counts, as in `ChannelState`. failures: in a row."""

    name: str
    pending: list[Notice] = []
    delivered: int = 0
    refused: int = 0
    dropped: int = 0
    failures: int = 0
    failing_since: float | None = None
    next_try_at: float | None = None
    delivered_at: float | None = None
    error: str = ""

    def add(self, notice: Notice) -> None:
        self.pending.append(notice)
        surplus = len(self.pending) - MAX_PENDING
        if surplus > 0:
            del self.pending[:surplus]
            self.dropped += surplus

    def due(self, now: float) -> Notice | None:
        """The notice to try now; None when nothing waits or it is too early."""
        fresh = [one for one in self.pending if now - one.at <= MAX_AGE_S]
        self.dropped += len(self.pending) - len(fresh)
        self.pending = fresh
        if not fresh or (self.next_try_at is not None and now < self.next_try_at):
            return None
        return fresh[0]

    def took(self, notice: Notice, now: float) -> None:
        """It was delivered."""
        self._remove(notice)
        self.delivered += 1
        self.delivered_at = now
        self._is_well()
        self.error = ""

    def would_not(self, notice: Notice, why: str) -> None:
        """The endpoint answers, but does not want this notice."""
        self._remove(notice)
        self.refused += 1
        self._is_well()
        self.error = why[:KEPT_ERROR]

    def failed(self, why: str, now: float, retry_after_s: float = 0.0) -> None:
        """It stays and is tried again: after 1 s, 2 s, 4 s, ... up to 5 min."""
        pause = min(FIRST_PAUSE_S * 2 ** min(self.failures, 20), LONGEST_PAUSE_S)
        self.failures += 1
        self.failing_since = now if self.failing_since is None else self.failing_since
        self.next_try_at = now + max(pause, min(retry_after_s, LONGEST_PAUSE_S))
        self.error = why[:KEPT_ERROR]

    def state(self) -> ChannelState:
        """As others may see it."""
        return ChannelState(
            name=self.name,
            pending=len(self.pending),
            delivered=self.delivered,
            refused=self.refused,
            dropped=self.dropped,
            failing_since=self.failing_since,
            next_try_at=self.next_try_at if self.pending else None,
            delivered_at=self.delivered_at,
            error=self.error,
        )

    def _remove(self, notice: Notice) -> None:
        # It may have been dropped while it was under way
        self.pending = [one for one in self.pending if one.id != notice.id]

    def _is_well(self) -> None:
        self.failures, self.failing_since, self.next_try_at = 0, None, None
