"""Power of one host: its backends, a ledger per rack, and the caps that were there before us.

Calls may come from several threads. Time is passed in. It keeps every promise without a controller:
budgets, limits, heat and restoring are dealt with here; what pace needs is the governor's.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from runtime.config import Config, RackConfig
from runtime.power.ledger import HeatRule, RackLedger
from runtime.power.port import PowerBackend, PowerError, PowerLimits, Reading
from runtime.power.prior import PriorCaps, PriorFile
from runtime.power.rack_caps import CapBatch, RackCaps

KEPT_BATCHES = 512
RETRY_S = 10.0
# A boost needs somebody who watches it: without a controller for this long it is taken back.
UNWATCHED_S = 15.0
# A cap this close to the one it was found with is that one.
_SAME_W = 0.5
_LOG = logging.getLogger(__name__)


class PowerOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a host's devices allow, for whoever plans: the narrowest limits of its GPUs.

    dead_slot_w: what a GPU without a worker keeps of the budget. obstacle: why caps cannot be set.
    """

    backend: str
    min_w: float
    normal_w: float
    max_w: float
    dead_slot_w: float = 0.0
    obstacle: str = ""


class HostPower:
    """Caps of a host's racks.

    Args:
        config: the run's configuration. racks: ours.
        backends: by GPU id.
        now: epoch seconds. home: folder for the file of prior caps; None keeps none.
    """

    def __init__(
        self,
        config: Config,
        racks: Sequence[RackConfig],
        backends: Mapping[str, PowerBackend],
        *,
        now: float,
        home: Path | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._backends = dict(backends)
        self._emulated = config.cluster.device == "emulated"
        self._batches: deque[CapBatch] = deque(maxlen=KEPT_BATCHES)
        self._raised_at = {rack.name: now for rack in racks}
        self._retried_at = now
        self._watched_at = now
        host = racks[0].host if racks else "localhost"
        self._file = PriorFile(home / "power" / f"caps-before-{host}.json") if home else None
        before_us = self._restore_leftover()
        caps_w = {gpu: _cap_of(backend) for gpu, backend in self._backends.items()}
        # What could not be restored now is still what was found, and goes back at the end.
        self._found_w = caps_w | before_us
        self._started_at = now
        self._racks = {rack.name: self._open_rack(rack, config, caps_w) for rack in racks}
        self._settle_all(now, "the agent started", "agent")

    # what there is ---------------------------------------------------------------------------

    def offer(self) -> PowerOffer:
        limits = [backend.limits() for backend in self._backends.values()]
        obstacles = [b.obstacle for b in self._backends.values() if b.obstacle]
        low_w = max((one.min_w for one in limits), default=0.0)
        return PowerOffer(
            backend=next((b.name for b in self._backends.values()), ""),
            min_w=low_w,
            normal_w=min((one.normal_w for one in limits), default=0.0),
            max_w=min((one.max_w for one in limits), default=0.0),
            dead_slot_w=0.0 if self._emulated else low_w,
            obstacle=obstacles[0] if obstacles else "",
        )

    def ledger(self, rack: str) -> RackLedger:
        return self._racks[rack].ledger

    def take_batches(self) -> list[CapBatch]:
        """What was set since the last call, oldest first."""
        with self._lock:
            taken = list(self._batches)
            self._batches.clear()
        return taken

    # what is told ----------------------------------------------------------------------------

    def want(self, caps_w: Mapping[str, float], now: float, cause: str, by: str) -> None:
        """Take wishes by GPU id (0: it trains nothing); carried out as far as they fit."""
        with self._lock:
            self._watched_at = now
            for name, caps in self._racks.items():
                own = {
                    int(gpu.rpartition("/")[2]): cap_w
                    for gpu, cap_w in caps_w.items()
                    if gpu.rpartition("/")[0] == name and gpu in self._backends
                }
                if own:
                    caps.ledger.want(own)
                    caps.retry()
                    self._settle(caps, now, cause, by)

    def set_budget(self, rack: str, budget_w: float, now: float, by: str) -> None:
        with self._lock:
            caps = self._racks.get(rack)
            if caps is None or abs(caps.ledger.budget_w - budget_w) < 0.5:
                return
            words = "cut" if budget_w < caps.ledger.budget_w else "raised"
            caps.ledger.set_budget(budget_w)
            caps.retry()
            self._settle(caps, now, f"the rack's budget was {words} to {budget_w:g} W", by)

    def worker_started(self, gpu: str, now: float) -> None:
        self._let(gpu, now, comes=True)

    def worker_exited(self, gpu: str, now: float) -> None:
        self._let(gpu, now, comes=False)

    def watched(self, now: float) -> None:
        """The controller is there."""
        self._watched_at = now

    # once a second ---------------------------------------------------------------------------

    def tick(self, now: float, dt_s: float) -> dict[str, Reading]:
        """Read every GPU, take watts back from hot ones, go on raising; readings by GPU id."""
        with self._lock:
            if now - self._retried_at > RETRY_S:
                self._retried_at = now
                for caps in self._racks.values():
                    caps.ledger.retry()
            readings: dict[str, Reading] = {}
            for name, caps in self._racks.items():
                found = caps.read()
                readings |= {f"{name}/{slot}": one for slot, one in enumerate(found)}
                self._tick_rack(caps, found, now, dt_s)
            return readings

    def _tick_rack(self, caps: RackCaps, found: list[Reading], now: float, dt_s: float) -> None:
        ledger = caps.ledger
        cause, by = "", ""
        hot = ledger.observe([one.temp_c for one in found], [one.throttled for one in found], dt_s)
        if hot:
            cause, by = "a GPU is hot or throttled", "agent"
        elif (
            now - self._watched_at > UNWATCHED_S
            and (ledger.wanted_w > ledger.limits.normal_w + 0.5).any()
        ):
            ledger.wanted_w.clip(max=ledger.limits.normal_w, out=ledger.wanted_w)
            cause, by = "the controller is away: nobody watches the boost", "agent"
        self._settle(caps, now, cause, by, lasting=False)

    # the end ---------------------------------------------------------------------------------

    def give_back(self, now: float, cause: str) -> bool:
        """Give every GPU back the cap it was found with, as far as the budgets allow; True: that
        was not far enough."""
        with self._lock:
            withheld = False
            for name, caps in self._racks.items():
                found = {
                    slot: self._found_w[f"{name}/{slot}"]
                    for slot in range(len(caps.ledger.caps_w))
                    if not math.isnan(self._found_w[f"{name}/{slot}"])
                }
                for slot in found:
                    caps.admit(slot)
                caps.retry()
                caps.ledger.want(found)
                # Lowers first, and whoever was off gets its lowest cap; then all the way up.
                self._settle(caps, now, cause, "agent", 0.0)
                self._settle(caps, now, "", "", math.inf)
                caps_w = caps.ledger.caps_w
                withheld |= any(
                    abs(caps_w[slot] - cap_w) > _SAME_W for slot, cap_w in found.items()
                )
            return withheld

    def close(self, now: float) -> None:
        """Give every cap back and let go of the devices."""
        with self._lock:
            withheld = self.give_back(now, "the agent ends: caps as they were found")
            if self._file is not None and not withheld:
                self._file.forget()
            elif withheld:
                _LOG.warning("a rack's budget or a GPU kept caps from what they were before")
            for backend in self._backends.values():
                backend.close()

    # inside ----------------------------------------------------------------------------------

    def _let(self, gpu: str, now: float, *, comes: bool) -> None:
        rack, _, slot = gpu.rpartition("/")
        with self._lock:
            caps = self._racks[rack]
            if comes:
                caps.admit(int(slot))
                self._settle(caps, now, f"{gpu} comes back", "agent", 0.0, lasting=False)
            else:
                caps.dismiss(int(slot))
                self._settle(caps, now, f"{gpu} has no worker", "agent", 0.0, lasting=False)

    def _open_rack(self, rack: RackConfig, config: Config, caps_w: Mapping[str, float]) -> RackCaps:
        backends = [self._backends[gpu] for gpu in rack.ids]
        limits = [backend.limits() for backend in backends]
        narrowest = PowerLimits(
            min_w=max(one.min_w for one in limits),
            normal_w=min(one.normal_w for one in limits),
            max_w=min(one.max_w for one in limits),
        )
        ledger = RackLedger(
            narrowest,
            [_or(caps_w[gpu], one.normal_w) for gpu, one in zip(rack.ids, limits, strict=True)],
            budget_w=rack.power_budget_w or rack.full_budget_w(narrowest.normal_w, narrowest.min_w),
            ramp_w_per_s=config.power.ramp_w_per_s,
            heat=HeatRule(hot_c=config.power.hot_c),
        )
        # Until they are told otherwise, spares idle.
        ledger.want(dict.fromkeys(range(rack.gpus, len(rack.ids)), 0.0))
        return RackCaps(
            rack.name,
            backends,
            ledger,
            before_first=self._keep_prior,
            keeps_power=not self._emulated,
        )

    def _settle_all(self, now: float, cause: str, by: str) -> None:
        for caps in self._racks.values():
            self._settle(caps, now, cause, by)

    def _settle(
        self,
        caps: RackCaps,
        now: float,
        cause: str,
        by: str,
        raise_s: float | None = None,
        *,
        lasting: bool = True,
    ) -> None:
        dt_s = min(1.0, max(0.0, now - self._raised_at[caps.rack])) if raise_s is None else raise_s
        batch = caps.settle(now, dt_s, cause, by, lasting=lasting)
        if batch is None:
            return
        if any(after > before for before, after in zip(batch.from_w, batch.to_w, strict=True)):
            self._raised_at[caps.rack] = now
        self._batches.append(batch)

    def _keep_prior(self) -> None:
        """Write down what was found, before anything changes."""
        if self._file is None or self._file.read() is not None:
            return
        self._file.write(
            PriorCaps(
                at=self._started_at,
                caps_w={gpu: w for gpu, w in self._found_w.items() if not math.isnan(w)},
                uuids={gpu: _uuid(backend) for gpu, backend in self._backends.items()},
            )
        )

    def _restore_leftover(self) -> dict[str, float]:
        """A killed agent left its caps behind: lower ones first, so that no sum passes what was.
        The caps of before it, by GPU id."""
        prior = self._file.read() if self._file is not None else None
        if prior is None:
            return {}
        mine = {
            gpu: cap_w
            for gpu, cap_w in prior.caps_w.items()
            if gpu in self._backends and prior.uuids.get(gpu, "") == _uuid(self._backends[gpu])
        }
        known = {gpu: _cap_of(self._backends[gpu]) for gpu in mine}
        for gpu in sorted(mine, key=lambda gpu: mine[gpu] - known[gpu]):
            if abs(mine[gpu] - known[gpu]) <= _SAME_W:
                continue
            try:
                self._backends[gpu].set_cap(mine[gpu])
            except PowerError as error:
                _LOG.warning("%s: its cap of before could not be restored: %s", gpu, error)
            else:
                _LOG.warning(
                    "%s: restored its power cap of before, %.0f W (%.0f W was left behind)",
                    gpu, mine[gpu], known[gpu],
                )  # fmt: skip
        return mine


def _cap_of(backend: PowerBackend) -> float:
    try:
        return backend.read().cap_w
    except PowerError:
        return math.nan


def _uuid(backend: PowerBackend) -> str:
    return str(getattr(backend, "uuid", ""))


def _or(value: float, default: float) -> float:
    return default if math.isnan(value) else value
