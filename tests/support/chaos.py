"""A run that loses ranks at named points: engines as they are, plans by the controller's own vote.

`Drill` is a controller in small: it aborts, fences who hangs, holds the vote with
`runtime.control.succession`, and takes the run through its faults to whole again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from runtime.config import Config
from runtime.control.succession import Aim, Past, aims_of, succeed
from runtime.engine.fail_points import Point
from runtime.engine.reference import Reference
from runtime.engine.step import StepResult
from runtime.plan.generation import GenerationPlan, Standing
from runtime.plan.manifest import Start
from tests.support.chaos_hosts import BATCH, DEADLINE_S, SLOTS, Command, Host
from tests.support.engine_checks import assert_same_params, unit_states

Action = Literal["kill", "hang", "hold"]
Shape = Literal["healthy", "shrinking", "mixed"]

LAST_STEP = 7
NEVER = float("inf")


@dataclass(frozen=True)
class Fault:
    """At its next pass of `point`, `gpu` is killed, hangs for good, or is held until the abort."""

    gpu: str
    point: Point
    action: Action

    def __str__(self) -> str:
        return f"{self.action} {self.gpu} at {self.point}"

    @property
    def lead(self) -> Fault | None:
        """What has to come before, so that the point is passed at all."""
        if self.point.startswith("roll."):
            return Fault(self.gpu, Point.AFTER_COMMIT, "hold")
        return None


@cache
def undisturbed(config_json: bytes) -> tuple[Reference, list[tuple[float, float]]]:
    """One process after all steps, and the (loss, norm) of every one of them."""
    reference = Reference(msgspec.json.decode(config_json, type=Config), dtype=torch.float64)
    return reference, [reference.step() for _ in range(LAST_STEP)]


class Drill:
    """One run through faults."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._reference, self._expected = undisturbed(msgspec.json.encode(host.config))
        self._armed: dict[tuple[str, str], Fault] = {}
        self._dead: set[str] = set()
        self._history: dict[int, GenerationPlan] = {}
        self._plan: GenerationPlan | None = None
        self._standings: dict[str, Standing] = {}
        self._committed = 0
        self._norm: float | None = None
        self._fired: list[Fault] = []

    @property
    def told(self) -> str:
        """What went off, in order, and what waits to."""
        waits = [f"armed: {fault}" for fault in self._armed.values()]
        return "; ".join([*map(str, self._fired), *waits]) or "no fault"

    def take(self, shape: Shape, faults: Sequence[Fault]) -> None:
        """Train, let `faults` go off in a step or a planned change, mend it all, and check.

        Healthy: all replicas are whole, and one is dropped to standby. Shrinking: one gives up a
        slot, whose state is then out of reach. Mixed: one is reduced, one stands by, and both
        become whole.
        """
        whole = [aim("training", range(count)) for count in SLOTS]
        fewer = [aim("training", (0, 2)), *whole[1:]]
        dropped = [*whole[:2], aim("standby", range(SLOTS[2]))]
        before, after = {
            "healthy": (whole, dropped),
            "shrinking": (whole, fewer),
            "mixed": ([*fewer[:2], dropped[2]], whole),
        }[shape]
        self._go(before)
        self._until(2)
        self._arm(faults)
        self._until(3)
        self._go(after)
        self._until(4)
        # The survivors take over what the dead held, and then the dead come back.
        self._go([aim("training", one.live) if one.live else one for one in self._left(whole)])
        self._until(5)
        assert not self._armed, f"not every fault went off: {self.told}"
        self._replace()
        self._go(whole)
        self._until(LAST_STEP)
        self._check()

    # what a controller does ------------------------------------------------------------------

    def _arm(self, faults: Sequence[Fault]) -> None:
        for fault in [*filter(None, (fault.lead for fault in faults)), *faults]:
            self._armed[fault.gpu, fault.point] = fault
            self._host.cluster.call({fault.gpu: ("trap", fault.point, fault.action)})

    def _until(self, step: int) -> None:
        """Train until `step` steps are committed, whatever fails meanwhile."""
        while self._committed < step:
            assert self._plan is not None
            if not self._together(dict.fromkeys(self._plan.members(), ("steps", 1))):
                self._go(aims_of(self._plan))

    def _go(self, aims: Sequence[Aim]) -> None:
        """Enter a generation of this shape, less what dies on the way."""
        self._vote()
        planned = True
        while True:
            number = len(self._history) + 1
            plan, _ = succeed(
                self._host.config,
                run=self._host.cluster._run,
                number=number,
                store=("127.0.0.1", self._host.cluster._pool.store.port),
                past=Past(
                    history=self._history,
                    previous=self._plan,
                    standings=self._standings,
                    committed_steps=self._committed,
                    start=Start(),
                    told_norm=self._norm,
                ),
                aims=shared(self._left(aims)),
                planned=planned,
            )
            self._history[number] = self._plan = plan
            self._committed = max(self._committed, plan.applied_step)
            if self._together(dict.fromkeys(plan.members(), ("enter", plan))):
                return
            self._vote()
            planned = False

    def _left(self, aims: Sequence[Aim]) -> list[Aim]:
        """`aims` without the dead: a replica that lost a slot stands by with the others."""
        found = []
        for number, one in enumerate(aims):
            live = tuple(slot for slot in one.live if f"r{number}/{slot}" not in self._dead)
            mode = one.mode if live == one.live else "standby" if live else "out"
            found.append(replace(one, replica=number, live=live, mode=mode))
        return found

    def _together(self, commands: dict[str, Command]) -> bool:
        """Let ranks do something together; False if a fault went off, which then is over.

        Whoever can go on in spite of the fault does, until all is quiet; then comes the abort.
        """
        host, busy, hung = self._host, set(commands), set[str]()
        deadline, abort_at, aborted = time.monotonic() + DEADLINE_S, NEVER, False
        host.begin(commands)
        while busy:
            now = time.monotonic()
            assert now < deadline, f"{sorted(busy)} did not answer; {self.told}"
            if now >= abort_at and not aborted:
                aborted = True
                host.abort(sorted(busy))
            if aborted:
                for gpu in hung:
                    host.fence(gpu)
                hung.clear()
            until = deadline if aborted else min(abort_at, deadline)
            for gpu, verdict, value in host.arrivals(until - now):
                if verdict == "trapped":
                    fault = self._armed.pop((gpu, value))
                    self._fired.append(fault)
                    hung |= {gpu} if fault.action == "hang" else set()
                    abort_at = 0.0
                else:
                    busy.discard(gpu)
                    self._answered(gpu, verdict, value, aborted=aborted)
                if abort_at < NEVER:
                    abort_at = time.monotonic() + host.quiet_s
        return abort_at == NEVER

    def _answered(self, gpu: str, verdict: str, value: Any, *, aborted: bool) -> None:
        if verdict == "died":
            self._dead.add(gpu)
            self._armed = {key: fault for key, fault in self._armed.items() if key[0] != gpu}
        elif verdict == "failed":
            assert aborted, f"{gpu}: {value}; {self.told}"
            assert value[0] == "GenerationAborted", f"{gpu}: {value}; {self.told}"
        elif isinstance(value, list):
            self._heard(gpu, value[0])

    def _heard(self, gpu: str, result: StepResult) -> None:
        loss, norm = self._expected[result.step]
        np.testing.assert_allclose([result.loss, result.grad_norm], [loss, norm], rtol=1e-10)
        assert result.hash_ok is not False, f"{gpu}: holders differ after step {result.step}"
        self._committed, self._norm = result.step + 1, result.grad_norm

    def _vote(self) -> None:
        alive = [gpu for gpu in self._host.cluster.ranks if gpu not in self._dead]
        self._standings = self._host.cluster.call(dict.fromkeys(alive, ("standing",)))

    def _replace(self) -> None:
        for gpu in sorted(self._dead):
            self._host.cluster.replace(gpu)
        self._dead.clear()

    def _check(self) -> None:
        assert self._plan is not None
        self._host.cluster.plan = self._plan
        assert self._committed == LAST_STEP
        standings = self._host.cluster.everyone("standing").values()
        assert {standing.applied_step for standing in standings} == {LAST_STEP}
        assert_same_params(self._host.cluster, self._reference, atol=1e-9)
        unit_states(self._host.cluster)
        assert self._host.cluster.layouts() == self._host.cluster.homes


def aim(mode: str, live: Sequence[int]) -> Aim:
    return Aim(replica=0, mode=mode, live=tuple(live), num_samples=0, caps_w=())


def shared(aims: Sequence[Aim]) -> list[Aim]:
    """Share the batch out; where nobody trains any more, who stands by does."""
    if not any(one.mode == "training" for one in aims):
        aims = [replace(one, mode="training") if one.live else one for one in aims]
    number = sum(one.mode == "training" for one in aims)
    found, place = [], 0
    for one in aims:
        count = 0
        if one.mode == "training":
            count = BATCH * (place + 1) // number - BATCH * place // number
            place += 1
        found.append(replace(one, num_samples=count))
    return found
