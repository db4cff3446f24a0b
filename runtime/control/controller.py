"""The controller process of one run: sockets, stores and clock around the coordinator.

One queue, one thread that takes decisions. Agents, the live store and signals only ever put events
into the queue; every instruction of the coordinator is carried out here. The TCPStore that the
ranks meet at lives here too and outlives every worker.
"""

from __future__ import annotations

import itertools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from runtime.config import Config
from runtime.control import messages as m
from runtime.control.archive import Archive
from runtime.control.channel import Channel, admit, listen
from runtime.control.coordinator import Coordinator
from runtime.control.instructions import (
    Answer,
    FindCheckpoint,
    Finish,
    Instruction,
    Order,
    Publish,
    Record,
    Seal,
)
from runtime.control.live_link import LiveLink
from runtime.control.memory import recall, remember
from runtime.control.outbox import Outbox
from runtime.engine.checkpoint import CheckpointError, prune, seal
from runtime.engine.resume import AFRESH, Beginning, find_fallback
from storage.commands import Command
from storage.live.port import LiveStore
from storage.records import ProposalChanged, RunEnded

TICK_S = 0.1
SNAPSHOT_S = 0.5
ARCHIVE_S = 0.2
HOST_GRACE_S = 3.0
FLUSH_S = 3.0
_LOG = logging.getLogger(__name__)


class _HostGone(msgspec.Struct, frozen=True):
    host: str
    channel_id: int


class _CommandArrived(msgspec.Struct, frozen=True):
    position: str
    command: Command | None


class _StopAsked(msgspec.Struct, frozen=True):
    reason: str


class _CheckpointWanted(msgspec.Struct, frozen=True):
    """To be found once all that was decided before is carried out."""


_Event = tuple[int, m.FromAgent] | _HostGone | _CommandArrived | _StopAsked | _CheckpointWanted


class Controller:
    """Runs one training run to its end; takes over one that an earlier controller left running.

    Args:
        config: the run's configuration. run: run id. home: folder of this run's files.
        store: live store, or None to go without one (benchmarks).
        key: control key shared with the agents.
        clock: seconds since the epoch.
        begin: the checkpoint to go on from, and words on that for the journal.
        observer: called with every journal entry after it was written (benchmarks, tests).
    """

    def __init__(
        self,
        config: Config,
        *,
        run: str,
        home: Path,
        store: LiveStore | None,
        key: bytes,
        clock: Callable[[], float] = time.time,
        observer: Callable[[object], None] | None = None,
        begin: Beginning = AFRESH,
    ) -> None:
        self._config = config
        self._run = run
        self._clock = clock
        self._observer = observer
        self._key = key
        self._listener: Listener = listen(config.control.host, config.control.port)
        self._connections = itertools.count(1)
        self._rendezvous, rendezvous_port = _host_rendezvous(config.control.host)
        self._outbox = Outbox(home / "journal", run=run, store=store)
        self._archive = Archive(home)
        self._archived_at = 0.0
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._channels: dict[str, tuple[int, Channel]] = {}
        self._lost_at: dict[str, float] = {}
        self._stop = threading.Event()
        self._stop_asked = False
        self._finished: Finish | None = None
        self._begins_at = begin
        self._checkpoints = (home / "checkpoint").resolve()
        self.coordinator = Coordinator(
            config,
            run=run,
            store=(config.control.host, rendezvous_port),
            now=clock(),
            checkpoints=str(self._checkpoints),
            start=begin.start,
        )
        self._left_behind = self._archive.load()
        self._position = self._left_behind[0].position if self._left_behind else ""
        self._link = None
        if store is not None:
            self._link = LiveLink(
                store, run=run, on_command=self._take_command, position=self._position
            )

    @property
    def address(self) -> tuple[str, int]:
        """Where agents connect."""
        host, port = self._listener.address
        return str(host), int(port)

    def ask_stop(self, reason: str) -> None:
        """End the run at the next step boundary; safe in a signal handler. Asked twice: at once."""
        self._events.put(_StopAsked(reason))

    def submit(self, command: Command) -> None:
        """Hand in a command without a live store (benchmarks, tests)."""
        self._take_command("", command)

    def run(self) -> Finish:
        """Serve until the run has ended; returns how it ended."""
        threading.Thread(target=self._accept_forever, name="accept", daemon=True).start()
        publisher = threading.Thread(
            target=self._outbox.publish_forever,
            args=(self._stop, self._link.write_again if self._link else lambda: None),
            name="journal",
            daemon=True,
        )
        publisher.start()
        linked = self._link.start(self._stop) if self._link is not None else []
        self._begin(self._clock())
        try:
            self._serve()
        finally:
            self._close([publisher, *linked])
        assert self._finished is not None
        return self._finished

    def _begin(self, now: float) -> None:
        """Start the run, or take it over where an earlier controller left it."""
        if self._left_behind is None:
            self.coordinator.progress.started(msgspec.json.encode(self._config).decode())
            if self._begins_at.damaged:
                text = self._begins_at.damaged
                self.coordinator.event("checkpoint_damaged", "critical", text, now)
            if self._begins_at.word:
                self.coordinator.note_start(self._begins_at.word, now)
        else:
            entries = self._outbox.read_all()
            if entries and isinstance(entries[-1], RunEnded):
                self._finished = Finish(status="stopped", reason=entries[-1].reason)
                return
            recall(self.coordinator, *self._left_behind, entries, now)
            for host in {rack.host for rack in self._config.cluster.racks}:
                self._lost_at[host] = now
        self._carry_out(self.coordinator.outgoing.take())

    def _serve(self) -> None:
        next_snapshot = 0.0
        while self._finished is None:
            try:
                event = self._events.get(timeout=TICK_S)
            except queue.Empty:
                event = None
            now = self._clock()
            if event is not None:
                self._carry_out(self._take(event, now))
            self._carry_out(self.coordinator.tick(now))
            for host, lost_at in list(self._lost_at.items()):
                if now - lost_at > HOST_GRACE_S:
                    self._lost_at.pop(host, None)
                    self._carry_out(self.coordinator.host_lost(host, now))
            if now >= next_snapshot or not isinstance(event, tuple | None):
                self._publish_snapshot(now)
                next_snapshot = now + SNAPSHOT_S
            if now - self._archived_at > ARCHIVE_S:
                self._remember(now)

    def _remember(self, now: float) -> None:
        self._archived_at = now
        self._archive.save_memory(remember(self.coordinator, self._position))

    def _take(self, event: _Event, now: float) -> list[Instruction]:
        if isinstance(event, tuple):
            instructions = self.coordinator.handle(event[1], now)
            if not isinstance(event[1], m.Pulse):
                self._publish_snapshot(now)
            return instructions
        if isinstance(event, _HostGone):
            if self._channels.get(event.host, (0, None))[0] == event.channel_id:
                self._lost_at[event.host] = now
            return []
        if isinstance(event, _CheckpointWanted):
            return self._find_checkpoint()
        if isinstance(event, _StopAsked):
            if self._stop_asked:
                self.coordinator.end_now(event.reason, now)
            self._stop_asked = True
            self.coordinator.finish("stopped", event.reason, now)
            return self.coordinator.outgoing.take()
        self._position = event.position or self._position
        if event.command is None:
            _LOG.error("command at %s does not decode and was skipped", event.position)
            self.coordinator.desk.intake.unreadable(event.position, now)
            return self.coordinator.outgoing.take()
        return self.coordinator.command(event.command, now)

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Order):
                if isinstance(instruction.message, m.EnterGeneration):
                    self._archive.save_plan(instruction.message.plan)
                    self._remember(self._clock())
                self._send(instruction)
            elif isinstance(instruction, Record):
                entry = self._outbox.write(instruction.entry)
                if self._observer is not None:
                    self._observer(entry)
            elif isinstance(instruction, Publish):
                self._publish_proposal(instruction)
            elif isinstance(instruction, Answer):
                if self._link is not None:
                    self._link.put_result(instruction.result)
                if self._observer is not None:
                    self._observer(instruction.result)
            elif isinstance(instruction, Seal):
                self._seal(instruction)
            elif isinstance(instruction, FindCheckpoint):
                self._events.put(_CheckpointWanted())
            else:
                self._finished = instruction

    def _seal(self, instruction: Seal) -> None:
        """Make a checkpoint of the parts, and then let go of the run's older ones."""
        folder = Path(instruction.folder)
        try:
            seal(folder, instruction.manifest)
        except CheckpointError as error:
            _LOG.error("%s", error)
            self.coordinator.event("checkpoint_failed", "critical", str(error), self._clock())
            self._carry_out(self.coordinator.outgoing.take())
            return
        prune(folder, self._config.checkpoint.keep)
        self.coordinator.event("checkpoint_written", "info", instruction.told, self._clock())
        self._carry_out(self.coordinator.outgoing.take())

    def _find_checkpoint(self) -> list[Instruction]:
        start, word = find_fallback(self._checkpoints, self.coordinator.start)
        self.coordinator.fallback.found(self.coordinator, start, word, self._clock())
        return self.coordinator.outgoing.take()

    def _publish_proposal(self, publish: Publish) -> None:
        proposal = publish.proposal
        entry = self._outbox.write(
            ProposalChanged(seq=0, at=self._clock(), run=self._run, proposal=proposal)
        )
        if self._link is not None:
            self._link.put_proposal(proposal)
        if self._observer is not None:
            self._observer(entry)

    def _publish_snapshot(self, now: float) -> None:
        if self._link is not None:
            self._link.put_state(self.coordinator.snapshot(now))

    def _send(self, order: Order) -> None:
        data = m.encode(order.message)
        for host, (_, channel) in list(self._channels.items()):
            if order.host in (None, host):
                channel.send(data)

    # agents ----------------------------------------------------------------------------------

    def _accept_forever(self) -> None:
        """Accept only: whoever connects and says nothing must not keep others out."""
        while not self._stop.is_set():
            try:
                connection = self._listener.accept()
            except (OSError, EOFError):
                continue
            threading.Thread(
                target=self._read_agent, args=(connection,), name="agent", daemon=True
            ).start()

    def _read_agent(self, connection: Connection) -> None:
        try:
            channel = admit(connection, self._key)
        except AuthenticationError:
            _LOG.warning("refused a connection with a wrong control key")
            return
        except (OSError, EOFError):
            return
        number = next(self._connections)
        host = ""
        while (data := channel.receive()) is not None:
            try:
                message = m.decode_from_agent(data)
            except m.MessageError as error:
                _LOG.error("agent %s: %s; closing its connection", host or "?", error)
                break
            if isinstance(message, m.AgentHello):
                host = message.host
                self._channels[host] = (number, channel)
                self._lost_at.pop(host, None)
            self._events.put((number, message))
        channel.close()
        if host:
            self._events.put(_HostGone(host, number))

    def _take_command(self, position: str, command: Command | None) -> None:
        self._events.put(_CommandArrived(position, command))

    def _close(self, threads: list[threading.Thread]) -> None:
        self._publish_snapshot(self._clock())
        if self._link is not None:
            self._outbox.flush(FLUSH_S, threading.Event())
            try:
                self._link.write_once()
            except Exception as error:  # noqa: BLE001 - the run has ended; say so and go
                _LOG.warning("the last state could not be published: %s", error)
        self._stop.set()
        # Whoever gave us the stores closes them next: nobody may be reading any more.
        for thread in threads:
            thread.join(timeout=2.0)
        self._listener.close()
        self._outbox.close()


def _host_rendezvous(host: str) -> tuple[TCPStore, int]:
    """A TCPStore that listens on `host` alone (by itself it would listen on every interface)."""
    listening = socket.create_server((host, 0), backlog=1024)
    port = listening.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, port
