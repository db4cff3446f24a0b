"""Long random walks over shapes equal one process: many over threads, some over real ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, example, given, settings

from runtime.config import ModelConfig
from tests.support.engine_pool import Cluster
from tests.support.engine_threads import ThreadCluster
from tests.support.engine_walks import Walk, take, walks

pytestmark = pytest.mark.usefixtures("one_thread")

# One head in turns, a slot each: the short last micro-batch ends before some slot has its turn; it
# has nothing to do there but must take part in every collective of backward all the same.
IDLE_SLOT = Walk(
    model=ModelConfig(
        num_layers=1,
        hidden=12,
        num_query_heads=1,
        num_kv_heads=1,
        head_dim=4,
        mlp_hidden=12,
        mlp_block=4,
        vocab=256,
        vocab_block=32,
        tied=False,
    ),
    sync="direct",
    fractional="on",
    slots=(4,),
    shapes=(((frozenset({1, 2, 3}), "training"),), ((frozenset({2, 3}), "training"),)),
    shares=(3, 3, 3),
)


@pytest.mark.timeout(300)
@given(walks())
@example(IDLE_SLOT)
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
