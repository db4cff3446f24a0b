"""Starts peers' programs and ends them: an interpreter that has them, and a network of their own.

Peers bind every interface, so they run where there is nothing but a loopback (a network namespace).
What is missing is told as words, never as an error: a peer that cannot run is not measured.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from runtime.bench.peers.jobs import Committed, PeerLog
from runtime.errors import CounterpoiseError

PYTHON_VARIABLE = "COUNTERPOISE_PEERS_PYTHON"
END_DEADLINE_S = 5.0
LOOK_S = 0.005
_ROOT = Path(__file__).resolve().parents[3]
# A loopback is down in a fresh namespace.
_LOOPBACK_UP = 'ip link set lo up && exec "$@"'


class NotRunnable(CounterpoiseError):
    """A peer cannot run here; the message says why."""


def peers_python() -> str:
    """The interpreter for peers' worker programs: COUNTERPOISE_PEERS_PYTHON or this one."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def require(module: str) -> None:
    """Raises NotRunnable unless the peers' interpreter can import `module`."""
    done = subprocess.run(
        [peers_python(), "-c", f"import {module}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotRunnable(
            f"{module} cannot be imported ({why}): install the extra `peers`, or name an "
            f"interpreter that has it in {PYTHON_VARIABLE}"
        )


def secluded(command: Sequence[str]) -> list[str]:
    """`command` in a network namespace with nothing but a loopback.

    Raises:
        NotRunnable: no namespace can be made here.
    """
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        raise NotRunnable("no network namespace: the commands `unshare` and `ip` are needed")
    prefix = ["unshare", "--map-root-user", "--net", "sh", "-c", _LOOPBACK_UP, "sh"]
    done = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotRunnable(f"no network namespace: {done.stderr.strip()}")
    return [*prefix, *command]


@contextlib.contextmanager
def started(command: Sequence[str], log: Path, **environment: str) -> Iterator[PeerLog]:
    """`command` with all it starts, in a session of its own, ended with SIGKILL at the end."""
    inherited = {**os.environ, "PYTHONPATH": str(_ROOT), **environment}
    with (log / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            env=inherited,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield PeerLog(log)
    finally:
        # Elastic agents put their workers in sessions of their own: those are ended by pid.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_DEADLINE_S)
        for path in log.glob("pid-*"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)


def wait_until(there: Callable[[], bool], deadline_s: float, what: str, log: Path) -> None:
    """Wait for `there`.

    Raises:
        NotRunnable: not within the deadline; with the end of the peer's output.
    """
    deadline = time.monotonic() + deadline_s
    while not there():
        if time.monotonic() > deadline:
            words = (log / "output").read_text(errors="replace").strip()[-300:]
            raise NotRunnable(f"no {what} within {deadline_s:g} s; its output ends: {words!r}")
        time.sleep(LOOK_S)


def steps_per_s(commits: Sequence[Committed]) -> float:
    """Commits a second over their span; 0.0 for fewer than two."""
    if len(commits) < 2:
        return 0.0
    return (len(commits) - 1) / (commits[-1].at - commits[0].at)
