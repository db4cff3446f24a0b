"""Gradient sync as the NTP paper and Megatron-LM do it; the leaf beside `DirectSync`.

Per stage: slots hand their rows to the core slots of their replica, core slots reduce with those of
the other replicas, and the sums go back. The three run on groups of their own, each in stage order,
so a later stage may be handed over while an earlier one is reduced or comes back. Hooks only launch
what is ready and never wait; that is left to `finish`.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.engine.passage import Lanes, Passage
from runtime.engine.state import State
from runtime.engine.sync import DirectSync
from runtime.errors import GenerationAborted
from runtime.layout.move import Flow
from runtime.layout.reshard import Stage
from runtime.layout.sync import SyncGroup


class ReshardSync:
    """Every stage through hand-over, reduction and return, as many at once as are ready.

    Messages belong to this object and it to one generation, as in `DirectSync`; `norms` sums the
    parameters that every rank holds.
    """

    def __init__(
        self, stages: Sequence[Stage], groups: Sequence[SyncGroup], flows: Sequence[Flow],
        state: State, lanes: Lanes, norms: DirectSync,
    ) -> None:  # fmt: skip
        """groups: those that this rank is a core slot of. flows: those of its replica."""
        self._passages = [Passage(stage, groups, flows, state, lanes) for stage in stages]
        self._norms = norms
        self._polls = all(not lane.streamed for lane in [lanes.out, *lanes.reduce.values()] if lane)
        self._missing: set[int] = set()
        self._out = self._reduced = self._back = 0
        self._failure: GenerationAborted | None = None
        self._armed = False

    @property
    def intra_replica_bytes(self) -> int:
        return sum(passage.bytes_sent for passage in self._passages)

    def begin(self) -> None:
        self._missing = set().union(*(passage.numbers for passage in self._passages))
        self._out = self._reduced = self._back = 0
        self._armed = True
        self._norms.begin()

    def ready(self, numbers: Sequence[int]) -> None:
        self._norms.ready(numbers)
        if self._armed:
            self._missing.difference_update(numbers)
            self._progress()

    def finish(self) -> None:
        self._missing.clear()
        self._progress()
        self._armed = False
        if self._failure is not None:
            raise self._failure
        for passage in self._passages[self._reduced :]:
            passage.reduce()
        for passage in self._passages[self._back :]:
            passage.advance()
        for passage in self._passages[self._back :]:
            passage.hand_back()
        for passage in self._passages:
            passage.finish()
        self._norms.finish()

    def _progress(self) -> None:
        """Launch whatever needs no wait: each kind of operation in stage order."""
        passages, count = self._passages, len(self._passages)
        if self._failure is not None:
            return
        try:
            while self._out < count and self._missing.isdisjoint(passages[self._out].numbers):
                passages[self._out].hand_over()
                self._out += 1
            while (
                self._polls
                and self._reduced < self._out
                and passages[self._reduced].is_handed_over()
            ):
                passages[self._reduced].reduce()
                self._reduced += 1
            while self._polls and self._back < self._reduced and passages[self._back].is_reduced():
                passages[self._back].hand_back()
                self._back += 1
        except GenerationAborted as error:
            self._failure = error
