"""Carries a rack's ledger out on its devices, and writes down every cap that was set or refused.

The only place that calls `set_cap` while a run goes on. Lowers first, raises after; what a device
refuses, the others make room for. Knows neither threads nor a clock: the host's power calls it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import msgspec

from runtime.power.ledger import RackLedger, limit_words
from runtime.power.port import DeviceGone, NoPermission, PowerBackend, PowerError, Reading

# A cap that differs by more from the one we know was set by somebody else, or lost.
_DRIFT_W = 1.5
# Lowers may free room for others only after several rounds when devices refuse.
_ROUNDS = 4
_LOG = logging.getLogger(__name__)


class CapBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Caps set on one rack at one moment for one cause: a row of the journal of caps.

    slots, from_w, to_w: what changed. refused: slot -> why its device did not take its cap.
    caps_w: every slot's cap afterwards (0.0: off). limited_by: what keeps caps from what is wished.
    """

    rack: str
    at: float
    cause: str
    by: str
    slots: tuple[int, ...]
    from_w: tuple[float, ...]
    to_w: tuple[float, ...]
    refused: dict[int, str]
    caps_w: tuple[float, ...]
    sum_w: float
    budget_w: float
    limited_by: str = ""


class RackCaps:
    """Caps of one rack.

    Args:
        rack: its name. backends: one per slot. ledger: made from the caps the backends have now.
        before_first: called once, before the first cap is set.
        keeps_power: a GPU without a worker still draws (real ones do), until it does not answer.
    """

    def __init__(
        self,
        rack: str,
        backends: Sequence[PowerBackend],
        ledger: RackLedger,
        *,
        before_first: Callable[[], None] = lambda: None,
        keeps_power: bool = False,
    ) -> None:
        self.rack = rack
        self.ledger = ledger
        self._backends = backends
        self._before_first: Callable[[], None] | None = before_first
        self._keeps_power = keeps_power
        self._refusals: dict[int, str] = {}
        self._told_limit = ""
        self.cause, self.by = "the agent started", "agent"

    def settle(
        self, at: float, dt_s: float, cause: str = "", by: str = "", *, lasting: bool = True
    ) -> CapBatch | None:
        """Bring the devices towards what is wished; what came of it, None when nothing did.

        Args:
            at: for the record. dt_s: seconds since raises were last handed out (ramp).
            cause: why now and by whom; "" goes on for the last cause (a ramp).
            lasting: later raises go by this cause too.
        """
        if cause and lasting:
            self.cause, self.by = cause, by
        before = self.ledger.caps_w.copy()
        refused_before = dict(self._refusals)
        for _ in range(_ROUNDS):
            lowers = self.ledger.lowers()
            if not self._apply(lowers):
                break
        self._apply(self.ledger.raises(dt_s))
        after = self.ledger.caps_w
        changed = [slot for slot in range(len(after)) if abs(after[slot] - before[slot]) > 0.05]
        refused = {s: why for s, why in self._refusals.items() if refused_before.get(s) != why}
        limit = limit_words(self.ledger.limited_by())
        if not changed and not refused and limit == self._told_limit:
            return None
        self._told_limit = limit
        return CapBatch(
            rack=self.rack,
            at=at,
            cause=cause or self.cause,
            by=by or self.by,
            slots=tuple(changed),
            from_w=tuple(float(before[slot]) for slot in changed),
            to_w=tuple(float(after[slot]) for slot in changed),
            refused=refused,
            caps_w=tuple(
                float(cap) if on else 0.0
                for cap, on in zip(after, self.ledger.powered, strict=True)
            ),
            sum_w=self.ledger.sum_w,
            budget_w=self.ledger.budget_w,
            limited_by=limit,
        )

    def admit(self, slot: int) -> None:
        """A GPU comes (back) to life: the next `settle` makes room for its lowest cap first."""
        if not self.ledger.powered[slot]:
            self.ledger.reserve(slot)

    def dismiss(self, slot: int) -> None:
        """A GPU has lost its worker: it needs its lowest cap, or nothing once it is off."""
        self.ledger.want({slot: 0.0})
        if not self._keeps_power:
            self.ledger.turn_off(slot)

    def retry(self) -> None:
        """Let devices that refused be asked again."""
        self._refusals.clear()
        self.ledger.retry()

    def read(self) -> list[Reading]:
        """A reading per slot; NaN and 0 W where the device is gone. Takes note of caps that changed
        by themselves: a driver reload, or another tool."""
        readings = []
        for slot, backend in enumerate(self._backends):
            try:
                reading = backend.read()
            except DeviceGone as error:
                reading = _GONE
                if self.ledger.powered[slot]:
                    _LOG.warning("%s/%d: %s", self.rack, slot, error)
                    self.ledger.turn_off(slot)
            else:
                if self._keeps_power and not self.ledger.powered[slot]:
                    self.admit(slot)
                self._compare(slot, reading)
            readings.append(reading)
        return readings

    def _compare(self, slot: int, reading: Reading) -> None:
        known = float(self.ledger.caps_w[slot])
        if math.isnan(reading.cap_w) or abs(reading.cap_w - known) <= _DRIFT_W:
            return
        _LOG.warning(
            "%s/%d: its cap went from %.0f W to %.0f W without us", self.rack, slot, known,
            reading.cap_w,
        )  # fmt: skip
        self.ledger.caps_w[slot] = reading.cap_w
        self.cause, self.by = "a cap changed without us: driver reload or another tool", "agent"

    def _apply(self, changes: Sequence[tuple[int, float]]) -> bool:
        """Set caps; True if a device refused, so that the rest must be reckoned anew."""
        refused = False
        for slot, cap_w in changes:
            if self._before_first is not None:
                before_first, self._before_first = self._before_first, None
                before_first()
            try:
                self._backends[slot].set_cap(cap_w)
            except PowerError as error:
                refused = True
                self._refusals[slot] = str(error)
                self.ledger.refused(slot)
                if not isinstance(error, NoPermission):
                    _LOG.warning("%s/%d: %s", self.rack, slot, error)
            else:
                self._refusals.pop(slot, None)
                self.ledger.took(slot, cap_w)
        return refused


_GONE = Reading(
    power_w=0.0, temp_c=math.nan, clock_mhz=0.0, util=0.0, cap_w=math.nan, throttled=False
)
