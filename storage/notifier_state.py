"""What the notifier says of itself in the live store, for `status` and the pages."""

from __future__ import annotations

import msgspec

from storage.records import SCHEMA


class ChannelState(msgspec.Struct, frozen=True, kw_only=True):
    """One way to reach people and how it does. name: kind and host, never the address.

    pending: notices that wait. refused: the endpoint would not take them. dropped: they grew too
    old, or too many waited. failing_since: None while it works. error: what the last failure said.
    """

    name: str
    pending: int = 0
    delivered: int = 0
    refused: int = 0
    dropped: int = 0
    failing_since: float | None = None
    next_try_at: float | None = None
    delivered_at: float | None = None
    error: str = ""


class NotifierState(msgspec.Struct, frozen=True, kw_only=True):
    """What the notifier says of itself, every few seconds. missed: entries that were gone from the
    journal before it came to read them."""

    at: float
    host: str
    base_url: str
    channels: tuple[ChannelState, ...]
    missed: int = 0
    schema: int = SCHEMA
