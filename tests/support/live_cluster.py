"""A run that only its agents and workers are simulated of: a real coordinator in real time, between
a live store and its people. For tests of the pages that need the runtime's own answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from runtime.config import Config
from runtime.control.instructions import Answer, Instruction, Publish, Record
from storage.live.port import LiveStore
from storage.records import JournalEntry, Proposal, ProposalChanged
from tests.support.control_cluster import SimCluster
from tests.support.services import wait_until

TURN_S = 0.05
TOLD_EVERY_S = 0.3


@dataclass
class _Told(SimCluster):
    """Tells the store what the controller would."""

    store: LiveStore | None = None
    seq: int = 0

    def _carry_out(self, instructions: list[Instruction]) -> None:
        super()._carry_out(instructions)
        for one in instructions:
            if isinstance(one, Record):
                self._append(one.entry)
            elif isinstance(one, Publish):
                self._append(
                    ProposalChanged(seq=0, at=self.now, run=self.run_id, proposal=one.proposal)
                )
                self._store.put_proposal(one.proposal)
            elif isinstance(one, Answer):
                self._store.put_result(self.run_id, one.result)

    def tell(self) -> None:
        """Write the run's snapshot."""
        self._store.put_run(self.coordinator.snapshot(self.now))

    def _append(self, entry: JournalEntry) -> None:
        self.seq += 1
        self._store.append(self.run_id, [msgspec.structs.replace(entry, seq=self.seq)])

    @property
    def _store(self) -> LiveStore:
        assert self.store is not None
        return self.store


class LiveCluster:
    """Runs it in a thread from `start` to `stop`; every method may be called from any other."""

    def __init__(self, config: Config, store: LiveStore, run: str) -> None:
        self.run, self.name = run, config.name
        self._cluster = _Told(config, run_id=run, now=time.time(), store=store)
        self._store = store
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._position = ""

    def start(self, *, steps: int = 2) -> LiveCluster:
        """Return once it has committed some steps."""
        config = msgspec.json.encode(self._cluster.config).decode()
        self._cluster.coordinator.progress.started(config)
        self._thread.start()
        wait_until(lambda: self._cluster.committed >= steps, 30.0, f"{steps} steps")
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def act(self, do: Callable[[SimCluster], object]) -> None:
        """Do something to the cluster between two turns of it."""
        with self._lock:
            do(self._cluster)

    def proposal(self, wanted: Callable[[Proposal], bool], what: str = "a proposal") -> Proposal:
        """The newest proposal that is as `wanted`, waited for."""

        def found() -> Proposal | None:
            held = list(self._cluster.proposals.values())
            return next((one for one in reversed(held) if wanted(one)), None)

        wait_until(lambda: found() is not None, 30.0, what)
        proposal = found()
        assert proposal is not None
        return proposal

    @property
    def decisions(self) -> list[tuple[str, str]]:
        """(who, verdict) of every decision so far."""
        return [(one.who, one.verdict) for one in self._cluster.decisions]

    def _loop(self) -> None:
        told_at = 0.0
        while not self._stop.wait(TURN_S):
            with self._lock:
                self._cluster.run(max(0.0, time.time() - self._cluster.now))
                for position, command in self._store.read_commands(self.run, self._position):
                    self._position = position
                    if command is not None:
                        self._cluster.submit(command)
                if self._cluster.now - told_at > TOLD_EVERY_S:
                    self._cluster.tell()
                    told_at = self._cluster.now
