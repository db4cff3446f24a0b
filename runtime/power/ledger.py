"""The ledger of one rack's watts: what every cap is, may be and shall be, and in which order.

Pure, without a clock. Its promise: as long as devices take the caps it hands out, the sum of the
caps of all powered GPUs never passes the budget and no cap its device's limits, in the middle of a
transition too. Lowering comes first and at once; raising only ever spends watts that are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.power.port import PowerLimits

Limit = Literal["", "budget", "temperature", "device"]
Floats = npt.NDArray[np.float64]
Changes = list[tuple[int, float]]

# Below this a difference of two caps is rounding.
_SAME_W = 1e-6
_WORDS: dict[Limit, str] = {
    "": "",
    "budget": "the rack's power budget",
    "temperature": "a hot or throttled GPU",
    "device": "the GPUs' highest cap",
}


class HeatRule(msgspec.Struct, frozen=True, kw_only=True):
    """When watts are taken back for heat, and when they may return.

    hot_c: 0 goes by the device's own throttling alone. A hot GPU above its normal cap goes back to
    it at once, then down by back_share of the normal cap every wait_s while it stays hot. Once it
    has been cooler than hot_c - margin_c for a hold that doubles with every relapse, its ceiling
    rises by return_share of the normal cap a second.
    """

    hot_c: float = 0.0
    margin_c: float = 5.0
    back_share: float = 0.05
    wait_s: float = 5.0
    first_hold_s: float = 30.0
    longest_hold_s: float = 600.0
    return_share: float = 0.01


class RackLedger:
    """Caps of one rack's slots.

    Args:
        limits: of every device of the rack.
        caps_w: what the devices enforce now, per slot.
        budget_w: limit for the sum of caps; 0 means the normal cap of every slot.
        ramp_w_per_s: how fast one cap may rise above the normal cap.
    """

    def __init__(
        self,
        limits: PowerLimits,
        caps_w: Sequence[float],
        *,
        budget_w: float = 0.0,
        ramp_w_per_s: float = 250.0,
        heat: HeatRule | None = None,
    ) -> None:
        self.limits = limits
        self._ramp = ramp_w_per_s
        self._heat = heat or HeatRule()
        self.caps_w: Floats = np.asarray(caps_w, dtype=np.float64).copy()
        num = len(self.caps_w)
        self.budget_w = budget_w or num * limits.normal_w
        self.wanted_w: Floats = np.full(num, limits.normal_w)
        self.powered = np.ones(num, dtype=bool)
        self._reserved = np.zeros(num, dtype=bool)
        self._stuck = np.zeros(num, dtype=bool)
        self._ceiling_w: Floats = np.full(num, limits.max_w)
        self._hold_s: Floats = np.full(num, self._heat.first_hold_s)
        self._cool_s: Floats = np.zeros(num)
        self._since_back_s: Floats = np.full(num, np.inf)

    # what is ---------------------------------------------------------------------------------

    @property
    def sum_w(self) -> float:
        """Sum of the caps of all powered GPUs."""
        return float(self.caps_w[self.powered].sum())

    @property
    def free_w(self) -> float:
        """Watts that may be handed out; negative while a cut or a refusal is being dealt with."""
        promised = self.limits.min_w * int((self._reserved & ~self.powered).sum())
        return self.budget_w - self.sum_w - promised

    @property
    def least_w(self) -> float:
        """The smallest budget that the powered GPUs can be held within."""
        return self.limits.min_w * int((self.powered | self._reserved).sum())

    def limited_by(self) -> Limit:
        """What keeps caps from what is wanted, the most pressing first."""
        asked = np.clip(self.wanted_w, self.limits.min_w, None)[self.powered]
        target = self.target_w()[self.powered]
        if not (target < asked - 1.0).any():
            return ""
        if ((self._ceiling_w < self.wanted_w - 1.0) & self.powered).any():
            return "temperature"
        over = self._clipped()[self.powered].sum() > self.budget_w + _SAME_W
        return "budget" if over else "device"

    # what happens ----------------------------------------------------------------------------

    def want(self, caps_w: Mapping[int, float]) -> None:
        """Take new wishes by slot; 0 means the GPU trains nothing and gets its lowest cap."""
        for slot, cap_w in caps_w.items():
            self.wanted_w[slot] = cap_w

    def set_budget(self, budget_w: float) -> None:
        self.budget_w = budget_w or len(self.caps_w) * self.limits.normal_w

    def turn_off(self, slot: int) -> None:
        """The GPU draws nothing any more: its watts are free."""
        self.powered[slot] = self._reserved[slot] = False

    def reserve(self, slot: int) -> None:
        """The GPU is coming back: keep its lowest cap free. `took` then counts it as powered."""
        self._reserved[slot] = True
        self.wanted_w[slot] = 0.0

    def took(self, slot: int, cap_w: float) -> None:
        """The device enforces `cap_w` now, by our order or by its own."""
        self.caps_w[slot] = cap_w
        self._stuck[slot] = False
        if self._reserved[slot]:
            self._reserved[slot], self.powered[slot] = False, True

    def refused(self, slot: int) -> None:
        """The device did not take its cap: the others make room for what it has, until `retry`."""
        self._stuck[slot] = True
        if self._reserved[slot]:
            self._reserved[slot], self.powered[slot] = False, True

    def retry(self) -> None:
        """Try again what was refused."""
        self._stuck[:] = False

    def observe(self, temp_c: Sequence[float], throttled: Sequence[bool], dt_s: float) -> bool:
        """Take temperatures and throttling of all slots; True if a ceiling went down.

        Args:
            temp_c: NaN where it is not known.
            dt_s: seconds since the last call.
        """
        rule, normal_w = self._heat, self.limits.normal_w
        temps = np.asarray(temp_c, dtype=np.float64)
        hot = np.asarray(throttled, dtype=bool) & self.powered
        if rule.hot_c > 0.0:
            hot |= (temps >= rule.hot_c) & self.powered
        self._since_back_s += dt_s
        lower = hot & (self._since_back_s >= rule.wait_s)
        if lower.any():
            relapsed = lower & (self._cool_s > 0.0)
            self._hold_s[relapsed] = np.minimum(2.0 * self._hold_s[relapsed], rule.longest_hold_s)
            step_w = np.where(
                self.caps_w > normal_w + 1.0, normal_w, self.caps_w - rule.back_share * normal_w
            )
            self._ceiling_w[lower] = np.maximum(self.limits.min_w, step_w[lower])
            self._since_back_s[lower] = 0.0
        self._cool_s[hot] = 0.0
        margin_c = rule.hot_c - rule.margin_c if rule.hot_c > 0.0 else np.inf
        cool = ~hot & ~(temps > margin_c)
        self._cool_s[cool] += dt_s
        back = cool & (self._cool_s >= self._hold_s) & (self._ceiling_w < self.limits.max_w)
        risen_w = self._ceiling_w[back] + rule.return_share * normal_w * dt_s
        self._ceiling_w[back] = np.minimum(self.limits.max_w, risen_w)
        return bool(lower.any())

    # what shall be ---------------------------------------------------------------------------

    def target_w(self) -> Floats:
        """Caps that fit: wishes within limits and ceilings, then boosts cut evenly, then the rest.

        GPUs that refuse keep what they have, the others make room. A budget below everybody's
        lowest cap leaves all at it; that is the most a cap can do.
        """
        target = self._clipped()
        counted = (self.powered | self._reserved) & ~self._stuck
        room_w = self.budget_w - float(self.caps_w[self.powered & self._stuck].sum())
        for floor_w in (self.limits.normal_w, self.limits.min_w):
            above = np.where(counted, np.maximum(target - floor_w, 0.0), 0.0)
            over_w = float(target[counted].sum()) - room_w
            if over_w <= _SAME_W or above.sum() <= 0.0:
                continue
            kept = 1.0 - min(1.0, over_w / float(above.sum()))
            cut = np.maximum(self.limits.min_w, np.floor(target - above * (1.0 - kept)))
            target = np.where(above > 0.0, cut, target)
        return target

    def lowers(self) -> Changes:
        """What must go down, at once; apply these before any raise."""
        target = self.target_w()
        due = (self.powered | self._reserved) & ~self._stuck
        due &= (target < self.caps_w - _SAME_W) | (self._reserved & ~self.powered)
        return [(int(slot), float(target[slot])) for slot in np.flatnonzero(due)]

    def raises(self, dt_s: float) -> Changes:
        """What may go up now, within the ramp and the free watts; whole watts.

        Args:
            dt_s: seconds since raises were last handed out.
        """
        target = self.target_w()
        ramp_w = np.maximum(self.limits.normal_w - self.caps_w, 0.0) + self._ramp * dt_s
        step = np.minimum(target - self.caps_w, ramp_w)
        step = np.where(self.powered & ~self._stuck, np.maximum(step, 0.0), 0.0)
        asked, free_w = float(step.sum()), self.free_w
        if asked <= _SAME_W or free_w <= 0.0:
            return []
        if asked > free_w:
            step *= free_w / asked
        whole = np.where(step + self.caps_w >= target - _SAME_W, step, np.floor(step))
        due = np.flatnonzero(whole > _SAME_W)
        return [(int(slot), float(self.caps_w[slot] + whole[slot])) for slot in due]

    def _clipped(self) -> Floats:
        """Wishes within the device's limits and the ceilings for heat."""
        low, high = self.limits.min_w, self.limits.max_w
        wanted = np.where(self._reserved, low, np.clip(self.wanted_w, low, high))
        return np.minimum(wanted, np.maximum(self._ceiling_w, low))


def limit_words(limit: Limit) -> str:
    """What limits a rack, in words; "" for nothing."""
    return _WORDS[limit]
