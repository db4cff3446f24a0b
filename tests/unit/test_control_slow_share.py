"""Slow, not dead, and kept: the batch leaves a slow replica a smaller share while it lasts."""

from __future__ import annotations

import msgspec
import pytest

from runtime.config import TrainConfig
from tests.support.control_cluster import SimCluster, sim_config

BATCH = msgspec.structs.replace(TrainConfig(), global_batch=24, micro_batch=24)
CONFIG = msgspec.structs.replace(sim_config(4, 4, 4), train=BATCH)


def shares(cluster: SimCluster) -> list[int]:
    return [replica.num_samples for replica in cluster.formed[-1].replicas]


@pytest.mark.parametrize(
    ("slow", "factor", "words", "samples"),
    [
        (("rack-1/2",), 1.6, "rack-1/2 slow", 6),
        (("rack-1/2",), 3.0, "rack-1/2 slow", 3),
        (tuple(f"rack-1/{slot}" for slot in range(4)), 1.6, "rack-1 slow", 6),
    ],
)
def test_a_slow_replica_gets_a_smaller_share_and_the_old_one_back(
    slow: tuple[str, ...], factor: float, words: str, samples: int
) -> None:
    cluster = SimCluster(CONFIG)
    cluster.run_steps(10)
    assert shares(cluster) == [8, 8, 8]
    for gpu in slow:
        assert cluster.fault(gpu, "slow", factor).ok
    if factor == 3.0:
        # To leave it out would gain more and is proposed first; people decide to keep it.
        proposal = cluster.wait_for_proposal(1)
        assert shares(cluster) == [8, 8, 8]
        assert cluster.decide(proposal, "rejected", reason="it is looked at").ok
    cluster.run_until(lambda: shares(cluster) != [8, 8, 8])
    (event,) = cluster.events("batch_reshared")
    assert words in event.message
    assert shares(cluster)[1] == samples
    cluster.run_steps(40)
    assert shares(cluster)[1] == samples
    assert cluster.open_for(1) is None  # A mere change of shares is no new question.
    for gpu in slow:
        assert cluster.fault(gpu, "slow", 1.0).ok
    cluster.run_until(lambda: shares(cluster) == [8, 8, 8], 90.0)
    cluster.run_steps(3)
    cluster.check()
