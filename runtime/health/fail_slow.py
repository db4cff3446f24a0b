"""Fail-slow from step times alone: who is slower than its peers, since when, by how much. Pure.

Every round each worker's time is held against its peers' (a low quantile, so that even half of them
slow do not set the measure) and against its own usual ratio. A one-sided CUSUM of the logarithm,
with each sample's part clipped, finds a factor of two in four samples and twenty per cent in a
few more, and no single burst can trip it. What slows most workers at once is nobody's own fault.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

SlowKind = Literal["slot", "replica", "global"]
# Quantile of the peers that is the measure of a round.
_REFERENCE_QUANTILE = 0.25
# One sample counts at most this much (log of the ratio, after the allowance).
_CLIP = 0.28
_TRIP = 0.85
_LEVEL_ROUNDS = 60
# A worker's usual ratio: the median of its first rounds, then moved by a step a round, so slowly
# that a drift shows before it becomes the custom.
_EARLY_ROUNDS = 12
_USUAL_STEP = 0.001
_NOISE_STEP = 0.05
# A sample that is as usual takes this much more from the score than its distance would.
_RELIEF = 2.5
# How far a worker's usual ratio may stray from its peers' and still be called usual.
_USUAL = 0.15
_CLEAR_ROUNDS = 5
_WARM_UP_ROUNDS = 2
_MOST = 0.5


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A stretch of slowness. ratio: median of its samples against what is usual. end: time of the
    last slow sample so far. found: when it was found. ended: it is over."""

    worker: str
    kind: SlowKind
    begin: float
    end: float
    found: float
    ratio: float
    ended: bool = False


@dataclass(slots=True)
class _Worker:
    """score: the CUSUM. usual: log ratio to its peers, sigma: its noise, both robust estimates."""

    early: list[float] | None = field(default_factory=list)
    usual: float = _USUAL
    sigma: float = 0.03
    before: float = 0.0
    score: float = 0.0
    begin: float = 0.0
    last_slow: float = 0.0
    found: float = 0.0
    is_slow: bool = False
    clear: int = 0
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def learn(self, ratio: float) -> None:
        """Take the ratio of a round in which nothing was wrong."""
        jump = ratio - self.before
        self.before = ratio
        if self.early is not None:
            self.early.append(ratio)
            if len(self.early) < _EARLY_ROUNDS:
                return
            middle = statistics.median(self.early)
            self.usual = min(max(middle, -_USUAL), _USUAL)
            spread = 1.4826 * statistics.median(abs(each - middle) for each in self.early)
            self.sigma = min(max(spread, 0.005), 0.5)
            self.early = None
            return
        moved = self.usual + math.copysign(_USUAL_STEP, ratio - self.usual)
        self.usual = min(max(moved, -_USUAL), _USUAL)
        if jump != 0.0:  # From one round to the next: an offset or a drift is no noise.
            grow = 1.0 + _NOISE_STEP if 1.05 * abs(jump) > self.sigma else 1.0 - _NOISE_STEP
            self.sigma = min(max(self.sigma * grow, 0.005), 0.5)

    def begin_anew(self) -> None:
        """Its share is another one from now on."""
        self.early = []
        if not self.is_slow:
            self.usual, self.score = _USUAL, 0.0


class SlowDetector:
    """Takes rounds, keeps who is slow.

    Args:
        groups: worker -> replica, to tell a slow replica from a slow slot; {} for none.
        allowance: ratio beyond the usual that is nobody's business, 1.08 for example.
    """

    def __init__(self, groups: Mapping[str, int] | None = None, allowance: float = 1.08) -> None:
        self._groups = dict(groups or {})
        self._members = _by_group(self._groups)
        self._allowance = math.log(allowance)
        self._workers: dict[str, _Worker] = {}
        self._levels: deque[float] = deque(maxlen=_LEVEL_ROUNDS)
        self._level = _Worker()
        self._warm_up = 0
        self.finished: list[Slow] = []

    def reconfigured(self, groups: Mapping[str, int] | None = None) -> None:
        """A new generation: shares differ from now on, and its first steps say little."""
        if groups is not None:
            self._groups = dict(groups)
            self._members = _by_group(self._groups)
        self._warm_up = _WARM_UP_ROUNDS
        self._levels.clear()
        for worker in self._workers.values():
            worker.begin_anew()
        for name in set(self._workers) - set(self._groups) if self._groups else ():
            del self._workers[name]

    def take(self, at: float, durations: Mapping[str, float]) -> None:
        """One round: seconds (or any unit) by worker; 0 stands for one that did not work."""
        working = {name: value for name, value in durations.items() if value > 0}
        if len(working) < 2:
            return
        if self._warm_up > 0:
            self._warm_up -= 1
            return
        reference = _quantile(sorted(working.values()), _REFERENCE_QUANTILE)
        self._take_level(at, statistics.median(working.values()))
        excess: dict[str, float] = {}
        for name, value in working.items():
            worker = self._workers.setdefault(name, _Worker())
            ratio = math.log(value / reference)
            excess[name] = ratio - worker.usual
            if not worker.is_slow and (worker.score == 0.0 or excess[name] <= 0.0):
                worker.learn(ratio)
        beyond = {name for name, value in excess.items() if value > self._allowance}
        if len(beyond) > _MOST * len(working) and not self._is_replica(beyond, working):
            return  # Most are slow at once: the input pipeline, the fabric, a checkpoint.
        for name, value in excess.items():
            self._score(name, at, value)

    def slow(self) -> list[Slow]:
        """Who is slow now, worst first."""
        current = [self._stretch(name) for name, w in self._workers.items() if w.is_slow]
        if self._level.is_slow:
            current.append(self._stretch(""))
        return sorted(current, key=lambda each: -each.ratio)

    def forget(self, worker: str) -> None:
        """What was held against a worker no longer counts."""
        self._workers.pop(worker, None)

    # a round ---------------------------------------------------------------------------------

    def _score(self, name: str, at: float, excess: float) -> None:
        worker = self._workers[name]
        allowance = max(self._allowance, 2.0 * worker.sigma)
        if self._accumulate(worker, at, excess, allowance):
            self.finished.append(self._stretch(name, ended=True))
            self._forget(worker)

    def _accumulate(self, worker: _Worker, at: float, excess: float, allowance: float) -> bool:
        """Move a worker's score. True: its slowness is over."""
        part = min(excess - allowance, _CLIP)
        part = part if part > 0.0 else _RELIEF * part
        if worker.score <= 0.0 and part > 0.0 and not worker.is_slow:
            worker.begin = at
            worker.samples.clear()
        worker.score = min(max(0.0, worker.score + part), 4.0 * _TRIP)
        if part > 0.0:
            worker.last_slow, worker.clear = at, 0
            worker.samples.append(excess)
        else:
            worker.clear += 1
        if not worker.is_slow and worker.score >= _TRIP:
            worker.is_slow, worker.found = True, at
        return worker.is_slow and worker.clear >= _CLEAR_ROUNDS

    def _take_level(self, at: float, level: float) -> None:
        """The job as a whole against its own past: a global slowdown."""
        usual = statistics.median(self._levels) if len(self._levels) >= 8 else level
        excess = math.log(level / usual)
        if self._accumulate(self._level, at, excess, max(self._allowance, 0.15)):
            self.finished.append(self._stretch("", ended=True))
            self._forget(self._level)
        if not self._level.is_slow and self._level.score == 0.0:
            self._levels.append(level)

    def _forget(self, worker: _Worker) -> None:
        worker.score, worker.is_slow, worker.clear = 0.0, False, 0
        worker.samples.clear()

    # kinds -----------------------------------------------------------------------------------

    def _is_replica(self, beyond: set[str], working: Mapping[str, float]) -> bool:
        """Whether those are whole replicas, and not all of them."""
        groups = {self._groups.get(name) for name in beyond}
        if None in groups or not self._groups:
            return False
        members = {name for name in working if self._groups.get(name) in groups}
        return len(beyond) >= 0.8 * len(members) and len(members) < len(working)

    def _kind(self, name: str) -> SlowKind:
        if not name:
            return "global"
        group = self._groups.get(name)
        if group is None:
            return "slot"
        members = [each for each in self._members[group] if each in self._workers]
        if len(members) < 2:
            return "slot"
        slow = sum(self._workers[each].is_slow for each in members)
        return "replica" if slow >= 0.8 * len(members) else "slot"

    def _stretch(self, name: str, *, ended: bool = False) -> Slow:
        worker = self._workers[name] if name else self._level
        return Slow(
            worker=name,
            kind=self._kind(name),
            begin=worker.begin,
            end=worker.last_slow,
            found=worker.found,
            ratio=math.exp(statistics.median(worker.samples)) if worker.samples else 1.0,
            ended=ended,
        )


def _by_group(groups: Mapping[str, int]) -> dict[int, list[str]]:
    members: dict[int, list[str]] = {}
    for worker, group in groups.items():
        members.setdefault(group, []).append(worker)
    return members


def _quantile(values: Sequence[float], share: float) -> float:
    return values[int(share * (len(values) - 1))]
