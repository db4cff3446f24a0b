"""The devices of one host: power, pace and temperature, published once a second.

One packed record per rack goes to the live store; when the store is away that second is lost and
nothing else happens. Which device is behind a GPU is the backend's business (`runtime.power`): on
emulated ones every number comes from the device model and the record says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from runtime.config import Config, RackConfig
from runtime.control import messages as m
from runtime.plan.generation import GenerationPlan
from runtime.power.backends.opening import open_backends
from runtime.power.emulated import EmulatedDevice
from runtime.power.host import HostPower, PowerOffer
from runtime.power.ledger import limit_words
from runtime.power.port import Reading
from runtime.power.rack_caps import CapBatch
from storage.live.port import LiveStore, LiveStoreDown
from storage.records import GPU_STATES, GpuState, RackRecord

PERIOD_S = 1.0
# A worker is told its device's speed when it moved by this much.
_TOLD_CHANGE = 0.002
_LOG = logging.getLogger(__name__)


class _Gpu:
    """Verdict and last share of one GPU; its device when it is emulated."""

    def __init__(self, device: EmulatedDevice | None) -> None:
        self.device = device
        self.state: GpuState = "failed"
        self.verdict: GpuState = "healthy"
        self.share_s = 0.0
        self.utilisation = 0.0
        self.told_speed = 1.0


class HostTelemetry:
    """Owns the power of a host's GPUs and publishes their readings.

    Args:
        config: the run's configuration. host: which racks are ours.
        store: live store, or None to publish nothing.
        clock: seconds since the epoch.
        home: folder that keeps the caps found before ours; None keeps none.
        nvml: the module `pynvml`, or one that speaks its interface; None imports it when needed.
    """

    def __init__(
        self,
        config: Config,
        *,
        host: str,
        store: LiveStore | None,
        clock: Callable[[], float] = time.time,
        home: Path | None = None,
        nvml: Any = None,
    ) -> None:
        self._emulated = config.cluster.device == "emulated"
        # Named by the plan of the first generation; nothing is published before.
        self._run = ""
        self._store = store
        self._clock = clock
        self._racks = [rack for rack in config.cluster.racks if rack.host == host]
        gpus = [gpu for rack in self._racks for gpu in rack.ids]
        devices = {gpu: EmulatedDevice(config.emulated) for gpu in gpus} if self._emulated else {}
        self._gpus = {gpu: _Gpu(devices.get(gpu)) for gpu in gpus}
        self.power = HostPower(
            config,
            self._racks,
            open_backends(config, gpus, devices, nvml),
            now=clock(),
            home=home,
        )
        self._lock = threading.RLock()
        self._members: tuple[str, ...] = ()
        self._last_step_at = 0.0
        self._last_step_s = 0.0
        self._store_away = False
        self._ecc: Callable[[], Mapping[str, int]] = dict

    # what the agent tells --------------------------------------------------------------------

    def worker_started(self, gpu: str) -> None:
        """Call before the worker runs: its rack makes room for its watts first."""
        self.power.worker_started(gpu, self._clock())
        with self._lock:
            self._gpus[gpu].state = "healthy"

    def worker_exited(self, gpu: str) -> None:
        with self._lock:
            entry = self._gpus[gpu]
            entry.state, entry.share_s, entry.utilisation = "failed", 0.0, 0.0
            if entry.device is not None:
                entry.device.set_slowness(1.0)
        self.power.worker_exited(gpu, self._clock())

    def set_verdicts(self, states: Mapping[str, GpuState]) -> None:
        """Show GPUs as the controller's verdicts say."""
        with self._lock:
            for gpu, state in states.items():
                if gpu in self._gpus:
                    self._gpus[gpu].verdict = state

    def count_ecc(self, ecc: Callable[[], Mapping[str, int]]) -> None:
        """From now on show the uncorrected ECC errors that `ecc()` tells by GPU."""
        self._ecc = ecc

    def generation_entered(self, plan: GenerationPlan) -> None:
        with self._lock:
            self._run = plan.run
            self._members = plan.members()
            for entry in self._gpus.values():
                entry.share_s = entry.utilisation = 0.0

    def step_done(self, message: m.StepDone) -> None:
        """Take every rank's share from a committed step."""
        with self._lock:
            self._last_step_at, self._last_step_s = self._clock(), message.step_s
            for gpu, share_s in zip(self._members, message.share_s, strict=False):
                entry = self._gpus.get(gpu)
                if entry is not None:
                    entry.share_s = share_s
                    entry.utilisation = min(1.0, share_s / max(message.step_s, 1e-6))

    def set_devices(self, order: m.SetDevice) -> None:
        """Carry out budgets, wished caps and injected slowness, as far as they are ours."""
        now = self._clock()
        for rack, budget_w in order.budgets_w.items():
            self.power.set_budget(rack, budget_w, now, order.by)
        if order.caps_w:
            self.power.want(order.caps_w, now, order.cause or "wished", order.by)
        with self._lock:
            for gpu, factor in order.slowness.items():
                entry = self._gpus.get(gpu)
                if entry is not None and entry.device is not None:
                    entry.device.set_slowness(factor)

    def speed(self, gpu: str) -> float:
        """Speed of a GPU's device, 1.0 is healthy at the normal cap; a real one shows its own."""
        with self._lock:
            device = self._gpus[gpu].device
            return device.speed() if device is not None else 1.0

    def changed_speeds(self) -> list[str]:
        """GPUs whose speed has moved since this last said so."""
        changed = []
        with self._lock:
            for gpu, entry in self._gpus.items():
                speed = self.speed(gpu)
                if abs(speed - entry.told_speed) > _TOLD_CHANGE:
                    entry.told_speed = speed
                    changed.append(gpu)
        return changed

    def offer(self) -> PowerOffer:
        """What the devices allow, for the controller."""
        return self.power.offer()

    def take_batches(self) -> list[CapBatch]:
        """Caps set since the last call."""
        return self.power.take_batches()

    def return_caps(self) -> None:
        """The run is over: every GPU gets back the cap it was found with."""
        self.power.give_back(self._clock(), "the run ended: caps as they were found")

    def watched(self) -> None:
        """The controller is connected."""
        self.power.watched(self._clock())

    # once a second ---------------------------------------------------------------------------

    def run_forever(self, stop: threading.Event, changed: Callable[[str], None]) -> None:
        """Advance devices and publish until `stop`, then give every cap back; `changed(gpu)` when
        a speed moved."""
        last = self._clock()
        try:
            while not stop.wait(PERIOD_S):
                now = self._clock()
                records = self.advance(now, max(0.0, min(now - last, 5.0)))
                last = now
                for gpu in self.changed_speeds():
                    changed(gpu)
                self._publish(records)
        finally:
            self.power.close(self._clock())

    def advance(self, now: float, dt_s: float) -> list[RackRecord]:
        """Move emulated devices `dt_s` on, read all, and return the racks' records."""
        with self._lock:
            stalled = now - self._last_step_at > max(3.0, 3 * self._last_step_s)
            for entry in self._gpus.values():
                if entry.device is not None:
                    entry.device.advance(dt_s, 0.0 if stalled else entry.utilisation)
        readings = self.power.tick(now, dt_s)
        with self._lock:
            for gpu, entry in self._gpus.items():
                if self._emulated and entry.state == "failed":
                    readings[gpu] = msgspec.structs.replace(
                        readings[gpu], power_w=0.0, clock_mhz=0.0
                    )
            return [self._record(rack, now, readings) for rack in self._racks]

    def _record(self, rack: RackConfig, now: float, readings: Mapping[str, Reading]) -> RackRecord:
        gpus = rack.ids
        entries = [self._gpus[gpu] for gpu in gpus]
        ledger, offer = self.power.ledger(rack.name), self.power.offer()
        limit = limit_words(ledger.limited_by())
        counted = self._ecc()
        ecc = np.asarray([counted.get(gpu, np.nan) for gpu in gpus], dtype="<f4")
        caps_w = np.where(ledger.powered, [readings[gpu].cap_w for gpu in gpus], 0.0)

        def packed(name: str) -> bytes:
            values = [getattr(readings[gpu], name) for gpu in gpus]
            return np.asarray(values, dtype="<f4").tobytes()

        return RackRecord(
            run=self._run,
            rack=rack.name,
            at=now,
            emulated=self._emulated,
            budget_w=ledger.budget_w,
            normal_cap_w=ledger.limits.normal_w,
            max_cap_w=ledger.limits.max_w,
            states=bytes(GPU_STATES.index(_shown(entry)) for entry in entries),
            power_w=packed("power_w"),
            cap_w=caps_w.astype("<f4").tobytes(),
            temp_c=packed("temp_c"),
            util=packed("util"),
            clock_mhz=packed("clock_mhz"),
            step_s=np.asarray([entry.share_s for entry in entries], dtype="<f4").tobytes(),
            ecc=ecc.tobytes() if np.isfinite(ecc).any() else b"",
            backend=offer.backend,
            notice=offer.obstacle or (f"caps are held back by {limit}" if limit else ""),
        )

    def _publish(self, records: list[RackRecord]) -> None:
        if self._store is None or not self._run:
            return
        try:
            self._store.put_racks(records)
            self._store_away = False
        except LiveStoreDown as error:
            if not self._store_away:
                _LOG.warning("telemetry is not published: %s", error)
            self._store_away = True


def _shown(entry: _Gpu) -> GpuState:
    """The verdict, unless the worker's end came before it."""
    if entry.state == "failed":
        return "repairing" if entry.verdict == "repairing" else "failed"
    return entry.verdict
