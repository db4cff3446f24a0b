"""Ending with one's parent: a role that `up` started must not outlive it, even a killed one."""

from __future__ import annotations

import os
import signal
import threading

PARENT = "COUNTERPOISE_PARENT"


def end_with_parent(period_s: float = 0.5) -> None:
    """If the environment names a parent process, send ourselves SIGTERM once it is gone."""
    named = os.environ.get(PARENT, "")
    if not named.isdigit():
        return
    parent = int(named)

    def watch() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(period_s)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lineage", daemon=True).start()
