"""The devices of one host: their caps, pace, power and temperature, published once a second.

One packed record per rack goes to the live store; when the store is away that second is lost and
nothing else happens. On emulated devices every number comes from the device model and the record
says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from runtime.config import Config, RackConfig
from runtime.control import messages as m
from runtime.plan.generation import GenerationPlan
from runtime.power.emulated import EmulatedDevice
from runtime.power.port import Reading
from storage.live.port import LiveStore, LiveStoreDown
from storage.records import GPU_STATES, GpuState, RackRecord

PERIOD_S = 1.0
_LOG = logging.getLogger(__name__)


class _Gpu:
    """Device, verdict and last share of one GPU."""

    def __init__(self, config: Config) -> None:
        self.device = EmulatedDevice(config.emulated)
        self.state: GpuState = "failed"
        self.share_s = 0.0
        self.utilisation = 0.0


class HostTelemetry:
    """Owns the emulated devices of a host and publishes their readings.

    Args:
        config: the run's configuration. host: which racks are ours.
        store: live store, or None to publish nothing.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        config: Config,
        *,
        host: str,
        store: LiveStore | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        # Named by the plan of the first generation; nothing is published before.
        self._run = ""
        self._store = store
        self._clock = clock
        self._racks = [rack for rack in config.cluster.racks if rack.host == host]
        self._gpus = {
            f"{rack.name}/{slot}": _Gpu(config) for rack in self._racks for slot in range(rack.gpus)
        }
        self._lock = threading.Lock()
        self._members: tuple[str, ...] = ()
        self._last_step_at = 0.0
        self._last_step_s = 0.0
        self._store_away = False

    # what the agent tells --------------------------------------------------------------------

    def worker_started(self, gpu: str) -> None:
        with self._lock:
            self._gpus[gpu].state = "healthy"

    def worker_exited(self, gpu: str) -> None:
        with self._lock:
            entry = self._gpus[gpu]
            entry.state, entry.share_s, entry.utilisation = "failed", 0.0, 0.0
            entry.device.set_slowness(1.0)

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

    def set_devices(self, caps_w: dict[str, float], slowness: dict[str, float]) -> None:
        with self._lock:
            for gpu, cap_w in caps_w.items():
                if gpu in self._gpus:
                    self._gpus[gpu].device.set_cap(cap_w)
            for gpu, factor in slowness.items():
                if gpu in self._gpus:
                    self._gpus[gpu].device.set_slowness(factor)

    def speed(self, gpu: str) -> float:
        """Speed of a GPU's device; 1.0 is healthy at the normal cap."""
        with self._lock:
            return self._gpus[gpu].device.speed()

    # once a second ---------------------------------------------------------------------------

    def run_forever(self, stop: threading.Event, changed: Callable[[str], None]) -> None:
        """Advance devices and publish until `stop`; `changed(gpu)` when a speed moved by 1 %."""
        last = self._clock()
        told: dict[str, float] = {}
        while not stop.wait(PERIOD_S):
            now = self._clock()
            records = self.advance(now, max(0.0, min(now - last, 5.0)))
            last = now
            self._publish(records)
            for gpu in self._gpus:
                speed = self.speed(gpu)
                if abs(speed - told.get(gpu, 1.0)) > 0.01:
                    told[gpu] = speed
                    changed(gpu)

    def advance(self, now: float, dt_s: float) -> list[RackRecord]:
        """Move every device `dt_s` on and return the racks' records."""
        with self._lock:
            stalled = now - self._last_step_at > max(3.0, 3 * self._last_step_s)
            readings = {}
            for gpu, entry in self._gpus.items():
                utilisation = 0.0 if stalled else entry.utilisation
                reading = entry.device.advance(dt_s, utilisation)
                if entry.state == "failed":
                    reading = msgspec.structs.replace(reading, power_w=0.0, clock_mhz=0.0)
                readings[gpu] = reading
            return [self._record(rack, now, readings) for rack in self._racks]

    def _record(self, rack: RackConfig, now: float, readings: dict[str, Reading]) -> RackRecord:
        gpus = [f"{rack.name}/{slot}" for slot in range(rack.gpus)]
        entries = [self._gpus[gpu] for gpu in gpus]
        emulated = self._config.emulated

        def packed(values: list[float]) -> bytes:
            return np.asarray(values, dtype="<f4").tobytes()

        return RackRecord(
            run=self._run,
            rack=rack.name,
            at=now,
            emulated=True,
            budget_w=rack.power_budget_w or emulated.normal_cap_w * rack.gpus,
            normal_cap_w=emulated.normal_cap_w,
            max_cap_w=emulated.max_cap_w,
            states=bytes(GPU_STATES.index(entry.state) for entry in entries),
            power_w=packed([readings[gpu].power_w for gpu in gpus]),
            cap_w=packed([entry.device.cap_w for entry in entries]),
            temp_c=packed([readings[gpu].temp_c for gpu in gpus]),
            util=packed([readings[gpu].util for gpu in gpus]),
            clock_mhz=packed([readings[gpu].clock_mhz for gpu in gpus]),
            step_s=packed([entry.share_s for entry in entries]),
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
