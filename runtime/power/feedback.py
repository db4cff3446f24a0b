"""The governor's feedback: trims a rack's boost until its slots keep the healthy pace, no further.

Pure, without a clock: step shares come in, wished caps go out. It starts from the planner's caps
and then believes measurements alone, slot by slot, so neither a wrong curve nor GPUs that differ
mislead it. Budget, limits, heat and ramp are the ledger's; what it granted comes back by `granted`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.power.port import PowerLimits

Floats = npt.NDArray[np.float64]


class TrimRule(msgspec.Struct, frozen=True, kw_only=True):
    """How a boost is trimmed.

    steps: shares measured for one decision (their median counts); settle: steps left out before,
        because they ran at the old caps in part.
    late: a slot that takes this much longer than the reference gets watts; early: one that is this
        much sooner gives some back, after `patience` such decisions in a row.
    largest: most that one trim changes a cap by, as a share of it.
    gain: a raise that shortens the longest lag by less than this share of itself does not help;
        after `tries` of them in a row the boost goes back to the plan's. At a limit one is enough,
        and the boost stays.
    """

    steps: int = 3
    settle: int = 1
    late: float = 0.015
    early: float = 0.03
    patience: int = 2
    largest: float = 0.08
    gain: float = 0.05
    tries: int = 3


class Governor:
    """Feedback on the boost of one rack.

    Args:
        limits: of the rack's devices. floor_w: cap of a live slot without boost.
        planned_w: the planner's caps per slot, 0 for slots that do not train.
    """

    def __init__(
        self,
        limits: PowerLimits,
        planned_w: Sequence[float],
        *,
        floor_w: float,
        rule: TrimRule | None = None,
    ) -> None:
        self._limits = limits
        self._rule = rule or TrimRule()
        self.floor_w = floor_w
        self._planned_w: Floats = np.asarray(planned_w, dtype=np.float64)
        self.wanted_w: Floats = self._planned_w.copy()
        self._live = self.wanted_w > 0.0
        self._granted_w: Floats = self.wanted_w.copy()
        self._window: list[Floats] = []
        self._to_skip = self._rule.settle
        self._early = 0
        self._in_vain = 0
        self._resting = False
        self._expected_lag = np.inf
        self.lag = 0.0

    @property
    def short(self) -> bool:
        """The rack is late although it has all the watts it may have: power cannot cover it, the
        batch plan has to."""
        return self.lag > self._rule.late and self._is_held_back()

    def granted(self, caps_w: Sequence[float], *, anew: bool = False) -> None:
        """The ledger's word on what the devices enforce now; measuring starts anew if it moved.

        Args:
            anew: somebody else moved them (a budget, heat): what was in vain may help now.
        """
        caps = np.asarray(caps_w, dtype=np.float64)
        if np.abs(caps - self._granted_w)[self._live].max(initial=0.0) > 0.5:
            self._granted_w = caps.copy()
            self._begin_window()
        if anew:
            self._in_vain, self._resting, self._expected_lag = 0, False, np.inf

    def observe(self, share_s: Sequence[float] | Floats, reference_s: float) -> Floats | None:
        """Take every slot's share of one step; new wishes when a trim is due.

        Args:
            share_s: seconds per slot; what is not live is ignored.
            reference_s: the share to keep pace with.
        """
        if reference_s <= 0.0 or not self._live.any():
            return None
        if self._to_skip > 0:
            self._to_skip -= 1
            return None
        self._window.append(np.asarray(share_s, dtype=np.float64) / reference_s)
        if len(self._window) < self._rule.steps:
            return None
        lateness = np.median(np.stack(self._window), axis=0) - 1.0
        self._window.clear()
        self.lag = float(lateness[self._live].max())
        late = self._live & (lateness > self._rule.late)
        if late.any():
            self._early = 0
            return self._raise(lateness, late)
        self._in_vain, self._resting, self._expected_lag = 0, False, np.inf
        return self._lower(lateness)

    def _raise(self, lateness: Floats, late: npt.NDArray[np.bool_]) -> Floats | None:
        """Watts for the slots that are late, unless the last ones did not help."""
        if self._resting:
            return None
        self._in_vain = self._in_vain + 1 if self.lag > self._expected_lag else 0
        if self._in_vain >= (1 if self._is_held_back() else self._rule.tries):
            self._resting = True
            return None if self._is_held_back() else self._wish(self._planned_w)
        # Pace rises more slowly than power, so a step of the same ratio never overshoots; it starts
        # from what was granted, not from what was wished: no wind-up at a limit.
        change = np.minimum(lateness, self._rule.largest)
        self._expected_lag = self.lag - self._rule.gain * float(change[late].max())
        wished = np.ceil(self._granted_w * (1.0 + change) - 1e-6)
        return self._wish(np.where(late, wished, self._granted_w))

    def _lower(self, lateness: Floats) -> Floats | None:
        """Take watts back from boosted slots that are early, once they have been for a while."""
        boosted = self._granted_w > self.floor_w + 0.5
        early = self._live & (lateness < -self._rule.early) & boosted
        self._early = self._early + 1 if early.any() else 0
        if self._early < self._rule.patience:
            return None
        self._early = 0
        change = np.maximum(lateness, -self._rule.largest)
        wished = np.floor(self._granted_w * (1.0 + change) + 1e-6)
        return self._wish(np.where(early, wished, self._granted_w))

    def _wish(self, wished_w: Floats) -> Floats | None:
        """New wishes within the limits; None when they are what was wished or is granted."""
        high_w = max(self.floor_w, self._limits.max_w)
        low_w = np.minimum(self.floor_w, self._granted_w)
        wanted = np.clip(wished_w, low_w, high_w) * self._live
        for known in (self._granted_w, self.wanted_w):
            if (np.abs(wanted - known)[self._live] <= 0.5).all():
                return None
        self.wanted_w = wanted
        self._begin_window()
        return wanted

    def _is_held_back(self) -> bool:
        below = (self._granted_w < self.wanted_w - 0.5) & self._live
        at_top = (self._granted_w >= self._limits.max_w - 0.5) & self._live
        return bool(below.any() or at_top.any())

    def _begin_window(self) -> None:
        self._window.clear()
        self._to_skip = self._rule.settle
