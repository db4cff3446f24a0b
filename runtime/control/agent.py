"""One agent per host: starts its workers, sees them die at once, caps power, passes messages on.

It takes no decision. While the controller is away the workers go on; what they committed is kept
here and told again on the next connection. When the agent itself ends, its workers end with it.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from multiprocessing import AuthenticationError, forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import msgspec

from runtime.config import Config
from runtime.control import messages as m
from runtime.control.channel import Channel, connect
from runtime.control.telemetry import HostTelemetry
from runtime.control.worker_entry import worker_main
from runtime.health.observation import Observation
from runtime.health.sources.port import SourceState
from runtime.health.sources.watch import open_watch

RECONNECT_S = 0.25
KEPT_STEPS = 4096
KEPT_CAPS = 256
KEPT_OBSERVATIONS = 1024
_READY = m.WorkerReady.__name__
_LOG = logging.getLogger(__name__)


class _Slot:
    """One GPU of this host and the worker process on it, if any.

    struck: the process is being ended. next_store: start another one as soon as it is gone."""

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self.process: ForkServerProcess | None = None
        self.channel: Channel | None = None
        self.connection: Connection | None = None
        self.struck = False
        self.next_store: tuple[str, int] | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None


class Agent:
    """Runs the workers of one host until told to quit.

    Args:
        config: the run's configuration.
        host: which racks are ours (RackConfig.host).
        address: (host, port) of the controller. key: the control key.
        telemetry: devices of this host: caps, slowness, 1 Hz records.
        stop: set from outside to end.
        home: folder that remembers which board sits in which slot; None remembers nothing.
        entry: where a worker process begins, with the arguments of `worker_main`.
    """

    def __init__(
        self,
        config: Config,
        *,
        host: str,
        address: tuple[str, int],
        key: bytes,
        telemetry: HostTelemetry,
        stop: threading.Event,
        home: Path | None = None,
        entry: Callable[..., None] = worker_main,
    ) -> None:
        self._entry = entry
        self._config_json = msgspec.json.encode(config)
        self._host = host
        self._address = address
        self._key = key
        self._telemetry = telemetry
        self._stop = stop
        self._slots = {
            gpu: _Slot(gpu)
            for rack in config.cluster.racks
            if rack.host == host
            for gpu in rack.ids
        }
        self._context = multiprocessing.get_context("forkserver")
        # Torch is imported once, in the forkserver, before any thread or CUDA context exists.
        self._context.set_forkserver_preload(["runtime.control.worker"])
        self._orders: queue.SimpleQueue[m.ToAgent] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = os.pipe()
        self._controller: Channel | None = None
        self._kept_steps: deque[bytes] = deque(maxlen=KEPT_STEPS)
        self._kept_state: dict[tuple[str, str], bytes] = {}
        # Caps that were set, told again after a gap; numbered so that each counts once.
        self._kept_caps: deque[bytes] = deque(maxlen=KEPT_CAPS)
        self._epoch, self._num_caps = time.time_ns(), 0
        self._kept_sources: dict[str, bytes] = {}
        self._kept_observations: deque[tuple[str | None, bytes]] = deque(maxlen=KEPT_OBSERVATIONS)
        self._uplink = threading.Lock()
        self._watch = open_watch(
            config.health,
            self.gpus,
            self._observed,
            home,
            real=config.cluster.device != "emulated",
            on_state=self._source_changed,
        )
        telemetry.count_ecc(self._watch.ecc)

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def run(self) -> None:
        """Serve until `stop` or a Quit; then end every worker."""
        # A store connection looks its peer's name up; a lost answer must not stall a rank for 5 s.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        forkserver.ensure_running()
        threading.Thread(target=self._stay_connected, name="uplink", daemon=True).start()
        self._watch.start(self._stop)
        try:
            while not self._stop.is_set():
                self._serve_once()
        finally:
            self._end_workers()

    def wake(self) -> None:
        """Make `run` look at its stop event now; safe in a signal handler."""
        os.write(self._wake_writer, b".")

    def speed_changed(self, gpu: str) -> None:
        """Tell a worker its device's new speed; called by the telemetry thread."""
        self._send_speed(self._slots[gpu])

    # workers ---------------------------------------------------------------------------------

    def _serve_once(self) -> None:
        watched: dict[Connection | int, _Slot] = {}
        for slot in self._slots.values():
            if slot.process is not None and slot.connection is not None:
                watched[slot.connection] = slot
                watched[slot.process.sentinel] = slot
        ready = wait([*watched, self._wake_reader], timeout=1.0)
        if self._wake_reader in ready:
            os.read(self._wake_reader, 4096)
        # Pipes before sentinels: a worker's last words come before the news of its end.
        for source in ready:
            if isinstance(source, Connection):
                self._drain_worker(watched[source])
        for source in ready:
            if isinstance(source, int) and source in watched:
                self._bury(watched[source])
        # Not sooner: what is ready may still be of the last process.
        for slot in self._slots.values():
            if slot.next_store is not None:
                self._start(slot, slot.next_store)
        while not self._orders.empty():
            self._obey(self._orders.get())
        if self._controller is not None:
            self._telemetry.watched()
        self._tell_caps()

    def _start(self, slot: _Slot, store: tuple[str, int]) -> None:
        if slot.alive:
            if slot.struck:
                slot.next_store = store
            return
        slot.struck, slot.next_store = False, None
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=self._entry, args=(self._config_json, slot.gpu, store, theirs), name=slot.gpu
        )
        # Its rack makes room for its watts before it draws any.
        self._telemetry.worker_started(slot.gpu)
        process.start()
        theirs.close()
        slot.process, slot.connection, slot.channel = process, ours, Channel(ours)
        self._send_speed(slot)

    def _drain_worker(self, slot: _Slot) -> None:
        """Take every message that lies in a worker's pipe; a broken pipe means a dead worker."""
        assert slot.connection is not None
        try:
            while slot.connection.poll():
                self._pass_on(slot.connection.recv_bytes())
        except (EOFError, OSError, m.MessageError) as error:
            if isinstance(error, m.MessageError):
                _LOG.error("worker %s: %s; stopping it", slot.gpu, error)
            if slot.process is not None:
                slot.process.kill()
                slot.process.join(timeout=5)
                self._bury(slot)

    def _bury(self, slot: _Slot) -> None:
        process = slot.process
        if process is None:
            return
        if slot.connection is not None and slot.channel is not None:
            with contextlib.suppress(EOFError, OSError, m.MessageError):
                while slot.connection.poll():
                    self._pass_on(slot.connection.recv_bytes())
            # Through the channel: another thread may be sending.
            slot.channel.close()
        process.join(timeout=5)
        code = process.exitcode if process.exitcode is not None else -signal.SIGKILL
        slot.process = slot.channel = slot.connection = None
        self._telemetry.worker_exited(slot.gpu)
        _LOG.warning("worker %s (pid %s) exited with %s", slot.gpu, process.pid, code)
        self._tell(
            m.WorkerExited(gpu=slot.gpu, pid=process.pid or 0, code=code, at=time.time()),
            kept=(slot.gpu, "exited"),
        )

    def _end_workers(self) -> None:
        quit_ = m.encode(m.Quit())
        alive = [slot for slot in self._slots.values() if slot.process is not None]
        for slot in alive:
            if slot.channel is not None:
                slot.channel.send(quit_)
        deadline = time.monotonic() + 2.0
        for slot in alive:
            assert slot.process is not None
            slot.process.join(timeout=max(0.0, deadline - time.monotonic()))
            if slot.process.exitcode is None:
                slot.process.kill()
                slot.process.join(timeout=2.0)

    # orders ----------------------------------------------------------------------------------

    def _obey(self, order: m.ToAgent) -> None:
        if isinstance(order, m.StartWorkers):
            for gpu in order.gpus:
                if gpu in self._slots:
                    self._start(self._slots[gpu], order.store)
        elif isinstance(order, m.KillWorker):
            self._strike(order)
        elif isinstance(order, m.CorruptState):
            self._forward(order.gpu, order)
        elif isinstance(order, m.SetDevice | m.ReturnCaps):
            self._set_devices(order)
        elif isinstance(order, m.SetVerdicts):
            self._telemetry.set_verdicts(order.states)
            self._forget({gpu for gpu, state in order.states.items() if state == "healthy"})
        elif isinstance(order, m.EnterGeneration):
            self._telemetry.generation_entered(order.plan)
            for gpu in order.plan.members():
                self._forward(gpu, order)
        elif isinstance(order, m.LeaveGeneration | m.Save):
            for gpu in self._slots:
                self._forward(gpu, order)
        else:
            self._stop.set()

    def _set_devices(self, order: m.SetDevice | m.ReturnCaps) -> None:
        if isinstance(order, m.SetDevice):
            self._telemetry.set_devices(order)
            self._tell_caps()
        else:
            self._telemetry.return_caps()
            self._tell_caps()
            self._send_up(m.encode(m.CapsReturned(host=self._host)))

    def _strike(self, order: m.KillWorker) -> None:
        slot = self._slots.get(order.gpu)
        if slot is not None and slot.process is not None and slot.process.pid is not None:
            if order.pid not in (0, slot.process.pid):
                return
            slot.struck = slot.struck or order.how == "kill"
            os.kill(slot.process.pid, signal.SIGKILL if order.how == "kill" else signal.SIGSTOP)

    def _forward(self, gpu: str, message: m.ToWorker) -> None:
        channel = self._slots[gpu].channel if gpu in self._slots else None
        if channel is not None:
            channel.send(m.encode(message))

    def _send_speed(self, slot: _Slot) -> None:
        self._forward(slot.gpu, m.DeviceSpeed(speed=self._telemetry.speed(slot.gpu)))

    # uplink ----------------------------------------------------------------------------------

    def _pass_on(self, data: bytes) -> None:
        message = m.decode_from_worker(data)
        if isinstance(message, m.StepDone):
            self._telemetry.step_done(message)
            with self._uplink:
                self._kept_steps.append(data)
            self._send_up(data)
        elif isinstance(message, m.Pulse):
            self._send_up(data)
        else:
            self._tell(message, kept=(message.gpu, type(message).__name__))

    def _tell(self, message: m.FromAgent, *, kept: tuple[str, str]) -> None:
        data = m.encode(message)
        with self._uplink:
            self._kept_state[kept] = data
            if isinstance(message, m.WorkerReady | m.WorkerExited):
                # What an earlier or a dead process said must not come after this.
                for gpu, kind in [key for key in self._kept_state if key != kept]:
                    if gpu == message.gpu:
                        del self._kept_state[gpu, kind]
        self._send_up(data)

    def _tell_caps(self) -> None:
        """Tell workers how fast their devices are now, and the controller which caps were set."""
        for gpu in self._telemetry.changed_speeds():
            self._send_speed(self._slots[gpu])
        for batch in self._telemetry.take_batches():
            self._num_caps += 1
            told = m.CapsSet(host=self._host, epoch=self._epoch, number=self._num_caps, batch=batch)
            data = m.encode(told)
            with self._uplink:
                self._kept_caps.append(data)
            self._send_up(data)

    def _observed(self, observation: Observation) -> None:
        """Tell the controller what a health source saw; called by the sources' threads."""
        told = m.Observed(host=self._host, id=uuid.uuid4().hex, observation=observation)
        data = m.encode(told)
        with self._uplink:
            self._kept_observations.append((observation.gpu, data))
        self._send_up(data)

    def _source_changed(self, state: SourceState) -> None:
        """Tell the controller how a health source is; called by the sources' threads."""
        told = m.SourceChanged(
            host=self._host, source=state.name, status=state.status, reason=state.reason
        )
        data = m.encode(told)
        with self._uplink:
            self._kept_sources[state.name] = data
        self._send_up(data)

    def _forget(self, gpus: set[str]) -> None:
        """These were repaired or cleared: what was seen before must not condemn them again, and
        what a source still holds against them is news."""
        with self._uplink:
            kept = [each for each in self._kept_observations if each[0] not in gpus]
            self._kept_observations.clear()
            self._kept_observations.extend(kept)
        self._watch.forget(gpus)

    def _send_up(self, data: bytes) -> None:
        controller = self._controller
        if controller is not None:
            controller.send(data)

    def _stay_connected(self) -> None:
        """Keep a connection to the controller; on each new one say hello and tell all again."""
        while not self._stop.is_set():
            try:
                channel = connect(*self._address, self._key)
            except (OSError, EOFError):
                self._stop.wait(RECONNECT_S)
                continue
            except AuthenticationError:
                _LOG.error("the controller refused our control key; trying again")
                self._stop.wait(2.0)
                continue
            self._introduce(channel)
            try:
                while (data := channel.receive()) is not None:
                    self._orders.put(m.decode_to_agent(data))
                    self.wake()
            except m.MessageError as error:
                _LOG.error("the controller: %s; connecting anew", error)
            self._controller = None
            channel.close()

    def _introduce(self, channel: Channel) -> None:
        hello = m.AgentHello(
            host=self._host,
            pid=os.getpid(),
            gpus=self.gpus,
            workers={
                slot.gpu: slot.process.pid
                for slot in list(self._slots.values())
                if slot.process is not None and slot.process.pid is not None
            },
            power=self._telemetry.offer(),
        )
        with self._uplink:
            channel.send(m.encode(hello))
            # Steps before standings: a standing's own last step would hide those before it.
            ready = [data for (_, kind), data in self._kept_state.items() if kind == _READY]
            rest = [data for (_, kind), data in self._kept_state.items() if kind != _READY]
            seen = [data for _, data in self._kept_observations]
            sources = self._kept_sources.values()
            kept = (*self._kept_steps, *rest, *self._kept_caps, *sources, *seen)
            for data in (*ready, *kept):
                channel.send(data)
            self._controller = channel
