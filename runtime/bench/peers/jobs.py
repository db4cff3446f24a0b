"""What a peer's worker program is told, and the log it answers with: plain values.

Every rank tells its pid; one rank a replica tells each committed step with its time. The bench,
outside, kills by pid and reads the log; it reaches into no peer.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from runtime.config import Config


class PeerJob(msgspec.Struct, frozen=True, kw_only=True):
    """port: first of a few free ports on 127.0.0.1. timeout_ms: of heartbeats and joins, 0 for the
    peer's default. checkpoint_every: steps, where the peer restarts from checkpoints."""

    config: Config
    num_replicas: int
    degree: int
    port: int
    folder: str
    timeout_ms: int = 0
    checkpoint_every: int = 10


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """One step that one replica committed, numbered from 0; at: seconds since the epoch."""

    at: float
    step: int
    replica: int


class PeerLog:
    """The folder that the ranks of one peer's run write to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def started(self, replica: int, slot: int, pid: int) -> None:
        (self._folder / f"pid-{replica}-{slot}").write_text(str(pid))

    def pid(self, replica: int, slot: int) -> int:
        return int((self._folder / f"pid-{replica}-{slot}").read_text())

    def committed(self, step: int, replica: int) -> None:
        entry = Committed(at=time.time(), step=step, replica=replica)
        with (self._folder / f"commits-{replica}").open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")

    def commits(self, replica: int) -> list[Committed]:
        """In the order in which they were committed; a line still being written is left out."""
        path = self._folder / f"commits-{replica}"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [msgspec.json.decode(line, type=Committed) for line in lines]


def read_job(path: str) -> PeerJob:
    return msgspec.json.decode(Path(path).read_bytes(), type=PeerJob)
