"""The power plan: the least boost that brings a reduced replica to pace, within a rack's power.

Pure; the model's word, which `feedback` corrects by measurements. Never plans above the rack's
budget or a device's limits; what power cannot cover is left to the batch plan. Equal work gives
equal caps; where whole heads and blocks load slots unevenly, watts go to the slots that hold the
others up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from runtime.errors import PlanError
from runtime.power.curve import Curve, curve_of
from runtime.power.port import PowerLimits

LimitedBy = Literal["", "budget", "device"]

_BISECTIONS = 40
# Caps are whole watts; this much above a whole watt is rounding, not a need.
_ROUNDING_W = 1e-6


class RackPower(msgspec.Struct, frozen=True, kw_only=True):
    """One rack as the power plan sees it.

    loads: per slot, the work it does times its slowness, relative to a healthy slot (0.0: trains
        nothing). live: slots that draw power; dead ones draw none.
    budget_w: limit for the sum of caps; 0 means the normal cap of every slot, dead ones included,
        so that their share is what a boost can spend.
    dead_slot_w: what a dead slot's GPU keeps of the budget (0: a dead GPU draws nothing).
    curve: points of the curve to plan by; () is the paper's fit.
    """

    loads: tuple[float, ...]
    live: tuple[int, ...]
    limits: PowerLimits
    budget_w: float = 0.0
    dead_slot_w: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def available_w(self) -> float:
        """Watts for the caps of the live slots."""
        whole_w = self.budget_w if self.budget_w > 0.0 else len(self.loads) * self.limits.normal_w
        return whole_w - self.dead_slot_w * (len(self.loads) - len(self.live))

    @property
    def paces(self) -> Curve:
        return curve_of(self.curve)


class CapPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Cap of every slot in watts (0.0 for dead slots), and what it brings.

    pace: of the slowest slot, relative to a healthy replica's pace a sample. limited_by: what kept
    it from the target, "" when it was reached.
    """

    caps_w: tuple[float, ...]
    pace: float
    limited_by: LimitedBy = ""

    @property
    def sum_w(self) -> float:
        return math.fsum(self.caps_w)


def floor_w(rack: RackPower) -> float:
    """Cap of every live slot without boost: the normal cap, or less if the budget cannot hold that.

    Raises:
        PlanError: the budget cannot even hold the live slots at their minimum.
    """
    if not rack.live:
        return 0.0
    share_w = rack.available_w / len(rack.live)
    if share_w < rack.limits.min_w:
        raise PlanError(
            f"a power budget of {rack.available_w:g} W cannot hold {len(rack.live)} live GPUs at "
            f"their minimum of {rack.limits.min_w:g} W; raise power_budget_w to "
            f"{len(rack.live) * rack.limits.min_w:g} W or more"
        )
    normal_w = min(rack.limits.normal_w, rack.limits.max_w)
    return normal_w if normal_w <= share_w else float(math.floor(share_w))


def plan_caps(rack: RackPower, target_pace: float = 1.0) -> CapPlan:
    """The least caps that reach `target_pace`, or the best pace that budget and limits allow.

    Args:
        target_pace: 1.0 is the pace a sample of a healthy replica at the normal cap.

    Raises:
        PlanError: see `floor_w`.
    """
    base_w = floor_w(rack)
    loads = sorted({rack.loads[slot] for slot in rack.live} - {0.0})
    if not loads:
        return CapPlan(caps_w=_spread(rack, base_w, {}), pace=0.0)
    top = min(rack.paces.perf(rack.limits.max_w / rack.limits.normal_w) / load for load in loads)
    goal = min(target_pace, top)
    caps = _caps_for(rack, loads, base_w, goal)
    limited_by: LimitedBy = "device" if top < target_pace else ""
    if _sum_w(rack, base_w, caps) > rack.available_w:
        limited_by = "budget"
        low, high = 0.0, goal
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2.0
            if _sum_w(rack, base_w, _caps_for(rack, loads, base_w, middle)) <= rack.available_w:
                low = middle
            else:
                high = middle
        caps = _caps_for(rack, loads, base_w, low)
    pace = min(rack.paces.perf(caps[load] / rack.limits.normal_w) / load for load in loads)
    if limited_by == "" and base_w < rack.limits.normal_w and pace < target_pace - 1e-6:
        limited_by = "budget"
    return CapPlan(caps_w=_spread(rack, base_w, caps), pace=pace, limited_by=limited_by)


def _caps_for(
    rack: RackPower, loads: Sequence[float], base_w: float, pace: float
) -> dict[float, float]:
    """Cap per distinct load for `pace`: whole watts, at least `base_w`, at most the limit."""
    caps = {}
    for load in loads:
        need_w = rack.limits.normal_w * rack.paces.power_for(min(pace * load, rack.paces.peak))
        whole_w = float(math.ceil(need_w - _ROUNDING_W))
        caps[load] = max(base_w, min(rack.limits.max_w, whole_w))
    return caps


def _sum_w(rack: RackPower, base_w: float, caps: dict[float, float]) -> float:
    return math.fsum(_spread(rack, base_w, caps))


def _spread(rack: RackPower, base_w: float, caps: dict[float, float]) -> tuple[float, ...]:
    alive = frozenset(rack.live)
    return tuple(
        caps.get(load, base_w) if slot in alive else 0.0 for slot, load in enumerate(rack.loads)
    )
