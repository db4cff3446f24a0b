"""One worker process: one GPU, one slot. It trains what the generation plan says and reports.

The main thread trains; a second thread reads messages, sets flags and sends pulses, so that the
worker answers while it waits in a collective. It knows no store and takes no decision: a plan comes
in, steps and its standing go out. It ends itself when its agent is gone: nobody could fence it.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from runtime.config import Config
from runtime.control import messages as m
from runtime.control.channel import Channel
from runtime.engine.checkpoint import CheckpointError, PartCopy, write_part
from runtime.engine.engine import Engine
from runtime.engine.fail_points import FailPoints
from runtime.engine.finite import NotFinite
from runtime.engine.state_hash import Difference
from runtime.engine.step import NonFiniteError
from runtime.errors import CounterpoiseError, GenerationAborted
from runtime.layout.units import unit_name
from runtime.plan.generation import NOT_FINITE, GenerationPlan

PULSE_S = 0.5
_LOG = logging.getLogger(__name__)


class _Park(msgspec.Struct, frozen=True):
    """Say where you stand, if you have not since leaving `generation`."""

    generation: int


class _SaveTo(msgspec.Struct, frozen=True):
    """Write a part of a checkpoint, copied at the boundary after `step` steps (0: now)."""

    generation: int
    folder: str
    step: int


class Worker:
    """Trains one slot; `run` returns when told to quit.

    Args:
        config: the run's configuration.
        gpu: GPU id `rack/slot`.
        connection: pipe to the agent.
        fail_points: where faults are injected, in tests.
    """

    def __init__(
        self,
        config: Config,
        gpu: str,
        connection: Connection,
        fail_points: FailPoints | None = None,
    ) -> None:
        self._config = config
        self._gpu = gpu
        self._connection = connection
        self._channel = Channel(connection)
        self._abort = threading.Event()
        self._speed = threading.Condition()
        self._speed_value = 1.0
        self._inbox: queue.SimpleQueue[GenerationPlan | _Park | _SaveTo | None] = (
            queue.SimpleQueue()
        )
        self._flags = threading.Lock()
        self._generation = 0
        self._aborted = 0
        self._leaving = 0
        self._last: m.StepDone | None = None
        self._wanted: _SaveTo | None = None
        # The last checkpoint that was asked for, and what became of this rank's part.
        self._saving = ""
        self._saved: m.Saved | None = None
        self._corrupt = False
        self._progress_at = time.perf_counter()
        self._engine = Engine(config, gpu, abort=self._abort, fail_points=fail_points)

    def run(self, store: tuple[str, int]) -> None:
        """Serve; connects to the rendezvous first, so that no generation waits for that."""
        reader = threading.Thread(target=self._listen, name="listen", daemon=True)
        reader.start()
        self._engine.connect(*store)
        self._send(m.WorkerReady(gpu=self._gpu, pid=os.getpid()))
        parked = 0
        while True:
            item = self._inbox.get()
            if item is None:
                return
            if isinstance(item, _SaveTo):
                self._save(item)
                continue
            if isinstance(item, _Park):
                if parked >= item.generation:
                    continue
                parked = item.generation
            elif item.generation <= self._generation:
                continue  # Told again after a reconnection.
            else:
                self._train(item)
                parked = item.generation
            self._send(
                m.Parked(
                    gpu=self._gpu,
                    generation=parked,
                    standing=self._engine.standing(),
                    last=self._last,
                )
            )

    # training thread -------------------------------------------------------------------------

    def _train(self, plan: GenerationPlan) -> None:
        """Enter a generation and step until it is left or aborted."""
        self._progress_at = time.perf_counter()
        with self._flags:
            self._generation = plan.generation
            if self._aborted >= plan.generation:
                return
            self._abort.clear()
        try:
            started = time.perf_counter()
            report = self._engine.enter(plan)
            self._send(
                m.Entered(
                    gpu=self._gpu,
                    generation=plan.generation,
                    seconds=time.perf_counter() - started,
                    bytes_received=report.bytes_received,
                )
            )
            leave = False
            while not leave:
                self._progress_at = time.perf_counter()
                leave = self._step(plan)
        except NonFiniteError as error:
            self._send(
                m.StepRefused(
                    gpu=self._gpu,
                    generation=plan.generation,
                    step=error.step,
                    seen=_seen(plan, error.seen),
                )
            )
        except CheckpointError as error:
            self._send(
                m.CheckpointRefused(gpu=self._gpu, generation=plan.generation, reason=str(error))
            )
        except GenerationAborted:
            _LOG.info("%s left generation %d", self._gpu, plan.generation)

    def _step(self, plan: GenerationPlan) -> bool:
        """One step. True: every rank leaves at this boundary."""
        started = time.perf_counter()
        if self._corrupt:
            self._corrupt = False
            self._engine.corrupt()
        result = self._engine.step(
            before_commit=lambda: self._wait_for_pace(started), leave=self._wants_to_leave
        )
        self._last = m.StepDone(
            gpu=self._gpu,
            generation=plan.generation,
            step=result.step,
            at=time.time(),
            loss=result.loss if math.isfinite(result.loss) else None,
            grad_norm=result.grad_norm,
            tokens=0 if result.grad_norm == NOT_FINITE else result.tokens,
            step_s=time.perf_counter() - started,
            exposed_sync_s=result.exposed_sync_s,
            share_s=result.compute_s,
            not_finite=_seen(plan, result.not_finite) if result.not_finite else None,
            difference=_differing(plan, result.difference),
        )
        if plan.members()[0] == self._gpu:
            self._send(self._last)
        wanted = self._wanted
        if wanted is not None and wanted.generation == plan.generation:
            self._save_at(result.step + 1, wanted)
        return result.leave

    def _save_at(self, applied: int, wanted: _SaveTo) -> None:
        """At the boundary after `applied` steps: copy if it is the one asked for."""
        if wanted.step > applied:
            return
        self._wanted = None
        if wanted.step == applied:
            self._save(wanted)
        else:
            why = f"was told after step {wanted.step}"
            self._tell_saved(m.Saved(gpu=self._gpu, error=why, folder=wanted.folder))

    def _save(self, wanted: _SaveTo) -> None:
        """Copy now, write in the background: training goes on meanwhile."""
        started = time.perf_counter()
        try:
            copy = self._engine.copy_part()
        except CounterpoiseError as error:
            self._tell_saved(m.Saved(gpu=self._gpu, error=str(error), folder=wanted.folder))
            return
        if wanted.step:
            seconds = time.perf_counter() - started
            self._send(m.Copied(gpu=self._gpu, step=wanted.step, seconds=seconds))
        threading.Thread(
            target=self._write, args=(wanted.folder, copy), name="write part", daemon=True
        ).start()

    def _write(self, folder: str, copy: PartCopy) -> None:
        try:
            part = write_part(Path(folder), self._gpu, copy)
            self._tell_saved(m.Saved(gpu=self._gpu, part=part, folder=folder))
        except CounterpoiseError as error:
            self._tell_saved(m.Saved(gpu=self._gpu, error=str(error), folder=folder))

    def _wants_to_leave(self) -> bool:
        steps = self._config.train.steps
        return self._leaving >= self._generation or (
            steps > 0 and self._engine.standing().applied_step + 1 >= steps
        )

    def _wait_for_pace(self, started: float) -> float | None:
        """Emulated device: wait until this rank's share would have taken that long on its device.

        A change of the device's speed meanwhile counts from now on for the rest of the share.
        Returns the seconds of the share; None when the device is real and was measured.
        """
        step_s = self._config.emulated.step_s
        if self._config.cluster.device != "emulated" or step_s == 0.0:
            return None
        left = self._engine.work_fraction() * step_s
        if left == 0.0:
            return 0.0
        with self._speed:
            left -= (time.perf_counter() - started) * self._speed_value
            while left > 0:
                if self._abort.is_set():
                    raise GenerationAborted("the generation was aborted")
                begin, speed = time.perf_counter(), self._speed_value
                self._speed.wait(timeout=left / speed)
                left -= (time.perf_counter() - begin) * speed
        return time.perf_counter() - started

    # listening thread ------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                arrived = self._connection.poll(PULSE_S)
                data = self._connection.recv_bytes() if arrived else None
            except (EOFError, OSError):
                os._exit(0)  # The agent is gone: without it nobody can fence this process.
            if data is None:
                self._pulse()
                continue
            self._obey(m.decode_to_worker(data))

    def _obey(self, message: m.ToWorker) -> None:
        if isinstance(message, m.EnterGeneration):
            with self._flags:
                # The order to leave may have been lost with a connection.
                if self._generation < message.plan.generation:
                    self._raise_abort(message.plan.generation - 1)
            self._inbox.put(message.plan)
        elif isinstance(message, m.LeaveGeneration):
            with self._flags:
                if message.abort:
                    self._raise_abort(message.generation)
                else:
                    self._leaving = max(self._leaving, message.generation)
            if message.abort:
                self._inbox.put(_Park(message.generation))
        elif isinstance(message, m.Save):
            self._take_save(message)
        elif isinstance(message, m.CorruptState):
            self._corrupt = True
        elif isinstance(message, m.DeviceSpeed):
            with self._speed:
                self._speed_value = max(message.speed, 1e-3)
                self._speed.notify_all()
        else:
            os._exit(0)

    def _take_save(self, order: m.Save) -> None:
        """Asked again, after a connection broke or a controller restarted: only tell again."""
        if order.folder == self._saving:
            if self._saved is not None:
                self._send(self._saved)
            return
        if not order.step and order.generation != self._generation:
            return
        self._saving, self._saved = order.folder, None
        wanted = _SaveTo(order.generation, order.folder, order.step)
        if order.step:
            self._wanted = wanted
        else:
            self._inbox.put(wanted)

    def _tell_saved(self, saved: m.Saved) -> None:
        if saved.folder == self._saving:
            self._saved = saved
        self._send(saved)

    def _raise_abort(self, generation: int) -> None:
        """Leave `generation` and all before it at once; the caller holds the flags."""
        self._aborted = max(self._aborted, generation)
        if self._generation <= generation:
            self._abort.set()
            with self._speed:
                self._speed.notify_all()

    def _pulse(self) -> None:
        self._send(
            m.Pulse(
                gpu=self._gpu,
                generation=self._generation,
                phase=self._engine.phase,
                phase_age_s=time.perf_counter() - self._progress_at,
            )
        )

    def _send(self, message: m.FromWorker) -> None:
        self._channel.send(m.encode(message))


def _seen(plan: GenerationPlan, found: NotFinite) -> m.NotFiniteSeen:
    gpus = plan.members()
    return m.NotFiniteSeen(
        gpus=tuple(gpus[rank] for rank in found.ranks), where=found.where, again=found.again
    )


def _differing(plan: GenerationPlan, found: Difference | None) -> m.StatesDiffer | None:
    if found is None:
        return None
    gpus = plan.members()
    return m.StatesDiffer(
        units=tuple(unit_name(family, unit) for family, unit in found.units),
        odd=tuple(gpus[rank] for rank in found.odd),
        unsure=tuple(gpus[rank] for rank in found.unsure),
    )


def worker_main(
    config_json: bytes,
    gpu: str,
    store: tuple[str, int],
    connection: Connection,
    fail_points: FailPoints | None = None,
) -> None:
    """Entry of a forked worker process. Exits 1 after telling the agent why it could not go on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Many ranks share a host's cores; more threads a rank would only fight for them.
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {gpu} %(message)s")
    channel = Channel(connection)
    try:
        config = msgspec.json.decode(config_json, type=Config)
        worker = Worker(config, gpu, connection, fail_points)
        worker.run(store)
    except CounterpoiseError as error:
        channel.send(m.encode(m.WorkerFailed(gpu=gpu, reason=str(error) or type(error).__name__)))
    except Exception as error:  # noqa: BLE001 - the process ends; its agent is told why
        _LOG.exception("worker failed")
        channel.send(m.encode(m.WorkerFailed(gpu=gpu, reason=f"{type(error).__name__}: {error}")))
        os._exit(1)
    os._exit(1)
