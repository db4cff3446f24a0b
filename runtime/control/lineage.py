"""Ending with one's parent: a role that `up` started must not outlive it, even a killed one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PARENT = "COUNTERPOISE_PARENT"
_PR_SET_PDEATHSIG = 1


def end_with_parent(period_s: float = 0.5) -> None:
    """If the environment names a parent process, send ourselves SIGTERM once it is gone."""
    parent = _parent()
    if parent is None:
        return

    def watch() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(period_s)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lineage", daemon=True).start()


def end_with_parent_through_exec() -> None:
    """The same for a process that will replace itself, which no thread survives; on Linux."""
    parent = _parent()
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:
        # It was gone before it could be seen to go.
        os.kill(os.getpid(), signal.SIGTERM)


def _parent() -> int | None:
    named = os.environ.get(PARENT, "")
    return int(named) if named.isdigit() else None
