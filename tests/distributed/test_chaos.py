"""Ranks killed, hung and held at every point of the engine's own list, alone and two at once.

After each the run goes on as if nothing had been: every step's loss and norm, the final parameters
of every holder and the hashes of all of them. COUNTERPOISE_TEST_CHAOS=all takes every pair.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import combinations_with_replacement, cycle
from typing import Literal

import pytest

from runtime.engine.fail_points import Point
from tests.support.chaos import Action, Drill, Fault, Shape
from tests.support.chaos_hosts import ProcessHost, ThreadHost, chaos_config
from tests.support.engine_pool import Pool

pytestmark = pytest.mark.usefixtures("one_thread")

ACTIONS: tuple[Action, ...] = ("kill", "hang", "hold")
ALONE: tuple[Shape, ...] = ("shrinking", "mixed")
TOGETHER: tuple[Shape, ...] = ("healthy", "mixed")
# Rank 0, slots of whole, reduced and standby replicas.
VICTIMS = ("r1/1", "r0/0", "r2/1", "r0/2", "r1/0", "r2/0")
# Of the pairs in CI: prime, so that all points, actions and victims come up.
STRIDE = 29

Pair = tuple[Shape, Literal["direct", "reshard"], Fault, Fault]


def over_threads(shape: Shape, sync: Literal["direct", "reshard"], *faults: Fault) -> None:
    host = ThreadHost(chaos_config(sync))
    drill = Drill(host)
    try:
        drill.take(shape, faults)
    except Exception as error:
        told = ", ".join(map(str, faults))
        raise AssertionError(f"{shape}, {sync}: {told}\n{drill.told}\n{error}") from error
    finally:
        host.close()


def every_pair() -> Iterator[Pair]:
    """Two ranks at once, each at its point: all pairs of points and ways to fail, both shapes."""
    victims = cycle([(a, b) for a in VICTIMS for b in VICTIMS if a != b])
    syncs = cycle(("direct", "direct", "reshard"))
    for first, second in combinations_with_replacement(Point, 2):
        for one, other in (("kill", "kill"), ("kill", "hang"), ("hang", "kill"), ("hold", "kill")):
            for shape in TOGETHER:
                a, b = next(victims)
                yield shape, next(syncs), Fault(a, first, one), Fault(b, second, other)


@pytest.mark.parametrize("shape", ALONE)
@pytest.mark.parametrize("point", Point)
def test_any_rank_at_any_point(point: Point, shape: Shape) -> None:
    for number, action in enumerate(ACTIONS):
        victim = VICTIMS[(2 * list(Point).index(point) + number) % len(VICTIMS)]
        over_threads(shape, "direct", Fault(victim, point, action))


@pytest.mark.timeout(3600 if "COUNTERPOISE_TEST_CHAOS" in os.environ else 300)
def test_two_at_once() -> None:
    everything = os.environ.get("COUNTERPOISE_TEST_CHAOS") == "all"
    for pair in list(every_pair())[:: 1 if everything else STRIDE]:
        over_threads(*pair)


@pytest.mark.timeout(300)
def test_processes_at_every_point(pool: Pool) -> None:
    """The same with real collectives, which a dead neighbour breaks and an abort leaves behind."""
    for number, point in enumerate(Point):
        host = ProcessHost(pool, chaos_config("direct"))
        drill = Drill(host)
        try:
            drill.take(ALONE[number % 2], [Fault(VICTIMS[number % 6], point, ACTIONS[number % 3])])
        finally:
            host.close()
