"""A run of many racks that exists only in the live store: for measuring those who look at it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from storage.live.port import LiveStore
from storage.records import (
    GenerationFormed,
    LedgerSpent,
    RackRecord,
    ReplicaState,
    RunStarted,
    RunState,
    StepCommitted,
)

NORMAL_W, MAX_W = 1000.0, 1200.0
IDEAL_STEP_S = 1.0
BATCH, SEQ_LEN = 1024, 4096


class BigRun:
    """Writes every rack, a step and the run's snapshot once a second, from a thread of its own."""

    def __init__(
        self, store: LiveStore, *, run: str, num_racks: int, num_slots: int,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._store = store
        self._run = run
        self._racks = [f"rack-{number}" for number in range(num_racks)]
        self._num_slots = num_slots
        self._clock = clock
        self._random = np.random.default_rng(0)
        self._seq = 0
        self._step = 0
        self._started_at = clock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_on, daemon=True)

    @property
    def num_gpus(self) -> int:
        return len(self._racks) * self._num_slots

    def start(self) -> None:
        now = self._clock()
        started = RunStarted(
            seq=self._next(), at=now, run=self._run, name=self._run, emulated=True,
            device="emulated B200", config="{}", seq_len=SEQ_LEN, global_batch=BATCH,
            num_params=480_000_000_000,
        )  # fmt: skip
        formed = GenerationFormed(
            seq=self._next(), at=now, run=self._run, generation=1, first_step=1,
            replicas=self._replicas(), cause="run started",
        )  # fmt: skip
        self._store.append(self._run, [started, formed])
        for _ in range(600):
            self._commit(now)
        self._publish(now)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def _write_on(self) -> None:
        while not self._stop.wait(1.0):
            now = self._clock()
            self._commit(now)
            self._publish(now)

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _commit(self, now: float) -> None:
        self._step += 1
        step = StepCommitted(
            seq=self._next(), at=now, run=self._run, step=self._step, generation=1,
            loss=2.0 + 3.0 / (1.0 + self._step / 100), grad_norm=0.8, tokens=BATCH * SEQ_LEN,
            step_s=IDEAL_STEP_S, exposed_sync_s=0.02, samples=((0, self._step * BATCH, BATCH),),
            replica_step_s=(IDEAL_STEP_S,) * len(self._racks),
        )  # fmt: skip
        spent = LedgerSpent(
            seq=self._next(), at=now, run=self._run, bucket="productive",
            begin=self._started_at + self._step - 1, end=self._started_at + self._step,
            tokens=BATCH * SEQ_LEN,
        )  # fmt: skip
        self._store.append(self._run, [step, spent])

    def _publish(self, now: float) -> None:
        self._store.put_racks([self._rack(name, now) for name in self._racks])
        self._store.put_run(
            RunState(
                run=self._run, name=self._run, status="running", emulated=True,
                device="emulated B200", started_at=self._started_at, updated_at=now, generation=1,
                step=self._step, seq_len=SEQ_LEN, global_batch=BATCH, num_params=480_000_000_000,
                replicas=self._replicas(), ledger={"productive": float(self._step)},
                wall_s=float(self._step), loss=2.0, tokens_per_s=BATCH * SEQ_LEN / IDEAL_STEP_S,
                step_s=IDEAL_STEP_S, ideal_step_s=IDEAL_STEP_S, time_goodput=1.0, token_goodput=1.0,
            )
        )  # fmt: skip

    def _replicas(self) -> tuple[ReplicaState, ...]:
        slots = range(self._num_slots)
        return tuple(
            ReplicaState(
                replica=number, rack=rack, mode="training",
                gpus=tuple(f"{rack}/{slot}" for slot in slots), live=tuple(slots),
                num_samples=BATCH // len(self._racks), units={"heads": (2,) * self._num_slots},
                step_s=IDEAL_STEP_S,
            )
            for number, rack in enumerate(self._racks)
        )  # fmt: skip

    def _rack(self, name: str, now: float) -> RackRecord:
        def column(mean: float, spread: float) -> bytes:
            values = self._random.normal(mean, spread, self._num_slots)
            return bytes(values.astype("<f4").tobytes())

        return RackRecord(
            run=self._run, rack=name, at=now, emulated=True, budget_w=NORMAL_W * self._num_slots,
            normal_cap_w=NORMAL_W, max_cap_w=MAX_W, states=bytes(self._num_slots),
            power_w=column(900, 10), cap_w=column(NORMAL_W, 0), temp_c=column(60, 2),
            util=column(0.95, 0.01), clock_mhz=column(1900, 5), step_s=column(IDEAL_STEP_S, 0.01),
        )  # fmt: skip
