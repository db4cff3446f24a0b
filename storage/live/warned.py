"""Leaves a bad record out of a list, and says so once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from storage.records import RecordError, decode_packed

T = TypeVar("T")
_REMEMBERED = 1000


class Warned:
    """Decodes records of a list: a bad one becomes None and one warning, however often read."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._seen: set[str] = set()

    def decoded(self, body: bytes, kind: Any, name: str) -> Any:
        """The record in `body`, or None; `name` is what the warning calls it."""
        return self.attempt(lambda: decode_packed(body, kind), name)

    def attempt(self, read: Callable[[], T], name: str) -> T | None:
        """What `read` returns, or None when it raises `RecordError`."""
        try:
            return read()
        except RecordError as error:
            with self._lock:
                is_new = name not in self._seen and len(self._seen) < _REMEMBERED
                if is_new:
                    self._seen.add(name)
            if is_new:
                self._log.warning("left out %s: %s", name, error)
            return None
