"""What every long-running process does first: log lines, and an orderly end on a signal."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable


def on_signals(end: Callable[[], None]) -> None:
    """Call `end` on SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end())


def set_up_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
