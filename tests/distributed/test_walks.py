"""Long random walks over shapes equal one process: many over threads, some over real ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.support.engine_pool import Cluster
from tests.support.engine_threads import ThreadCluster
from tests.support.engine_walks import Walk, take, walks


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks that are threads must not each ask for all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# By hand (COUNTERPOISE_TEST_WALKS=1): on a busy machine its threads have stood still for minutes.
@pytest.mark.skipif("COUNTERPOISE_TEST_WALKS" not in os.environ, reason="by hand: minutes long")
@given(walks())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_walks_of_ranks_that_are_threads(walk: Walk) -> None:
    made: list[ThreadCluster] = []

    def make(config: object, slots: object) -> ThreadCluster:
        made.append(ThreadCluster(config, slots))  # type: ignore[arg-type]
        return made[-1]

    try:
        assert take(walk, make) >= 1
    finally:
        for each in made:
            each.close()


def test_walks_of_real_ranks(cluster: Callable[..., Cluster]) -> None:
    @given(walks())
    @settings(max_examples=6, deadline=None, database=None, derandomize=True)
    def walk_on(walk: Walk) -> None:
        assert take(walk, cluster) >= 1

    walk_on()
