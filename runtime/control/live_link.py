"""The controller's link to the live store: newest snapshot, proposals and answers out, commands in.

Everything runs in threads of its own, so that a live store that is away never holds up training.
What could not be written is kept (newest version of each) and written when the store is back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from storage.commands import Command, CommandResult
from storage.live.port import LiveStore, LiveStoreDown
from storage.records import Proposal, RunState

RETRY_S = 0.5
_LOG = logging.getLogger(__name__)


class LiveLink:
    """Two threads around one live store.

    Args:
        store: the live store. run: run id.
        on_command: called for every command, from the reading thread; None stands for one that
            could not be decoded.
        position: where to go on reading commands.
    """

    def __init__(
        self,
        store: LiveStore,
        *,
        run: str,
        on_command: Callable[[str, Command | None], None],
        position: str = "",
    ) -> None:
        self._store = store
        self._run = run
        self._on_command = on_command
        self._position = position
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._state: RunState | None = None
        self._proposals: dict[str, Proposal] = {}
        self._standing: dict[str, Proposal] = {}
        self._results: dict[str, CommandResult] = {}

    def start(self, stop: threading.Event) -> list[threading.Thread]:
        threads = [
            threading.Thread(
                target=self._write_forever, args=(stop,), name="live-out", daemon=True
            ),
            threading.Thread(target=self._read_forever, args=(stop,), name="live-in", daemon=True),
        ]
        for thread in threads:
            thread.start()
        return threads

    def put_state(self, state: RunState) -> None:
        with self._lock:
            self._state = state
        self._wake.set()

    def put_proposal(self, proposal: Proposal) -> None:
        with self._lock:
            self._proposals[proposal.id] = proposal
            self._standing[proposal.id] = proposal
            if proposal.is_final:
                del self._standing[proposal.id]
        self._wake.set()

    def put_result(self, result: CommandResult) -> None:
        with self._lock:
            self._results[result.id] = result
        self._wake.set()

    def write_again(self) -> None:
        """The store may have forgotten everything: write what stands once more."""
        with self._lock:
            for proposal in self._standing.values():
                self._proposals.setdefault(proposal.id, proposal)
        self._wake.set()

    def _write_forever(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._wake.wait(RETRY_S)
            self._wake.clear()
            try:
                self.write_once()
            except LiveStoreDown as error:
                _LOG.debug("live state waits: %s", error)
                stop.wait(RETRY_S)

    def write_once(self) -> None:
        """Write all that is due; what fails stays due.

        Raises:
            LiveStoreDown: the store is away.
        """
        with self._lock:
            state, proposals, results = self._state, dict(self._proposals), dict(self._results)
        # Proposals first: a state that shows a new generation must not precede them.
        for proposal in proposals.values():
            self._store.put_proposal(proposal)
            with self._lock:
                if self._proposals.get(proposal.id) is proposal:
                    del self._proposals[proposal.id]
        for result in results.values():
            self._store.put_result(self._run, result)
            with self._lock:
                self._results.pop(result.id, None)
        if state is not None:
            self._store.put_run(state)
            with self._lock:
                if self._state is state:
                    self._state = None

    def _read_forever(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                commands = self._store.read_commands(self._run, self._position, block_ms=500)
            except LiveStoreDown as error:
                _LOG.debug("commands wait: %s", error)
                stop.wait(RETRY_S)
                continue
            for position, command in commands:
                self._position = position
                self._on_command(position, command)
