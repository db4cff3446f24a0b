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


def slowed(factor: float) -> SimCluster:
    """A run whose rack-1/2 has just been found slow."""
    cluster = SimCluster(CONFIG)
    cluster.run_steps(20)
    assert cluster.fault("rack-1/2", "slow", factor).ok
    cluster.run_until(lambda: bool(cluster.events("gpu_degraded")))
    return cluster


@pytest.mark.parametrize(
    ("factor", "reduced", "grown"),
    [
        # A quarter of the replica would be given up for a fifth.
        (1.2, (1, 2, 3), (0, 1, 2, 3)),
        (3.0, (1, 3), (0, 1, 3)),
    ],
)
def test_a_slow_slot_stays_where_its_replica_is_faster_with_it(
    factor: float, reduced: tuple[int, ...], grown: tuple[int, ...]
) -> None:
    cluster = slowed(factor)
    cluster.kill("rack-1/0")
    cluster.run_until(lambda: cluster.shape()[1] == ())
    for repaired, expected in ((False, reduced), (True, grown)):
        if repaired:
            assert cluster.fault("rack-1/0", "repair").ok
        proposal = cluster.wait_for_proposal(1)
        choice = proposal.options[proposal.recommended]
        assert choice.shape[1] == expected
        assert ("Slot 2 is slow and stays" in choice.risk) == (2 in expected)
        assert cluster.approve(proposal).ok
        cluster.run_until(lambda wanted=expected: cluster.shape()[1] == wanted)
    cluster.run(30.0)
    assert cluster.open_for(1) is None
    cluster.check()


def test_a_slot_that_grows_slower_is_looked_at_again() -> None:
    cluster = slowed(1.2)
    cluster.run(15.0)
    assert cluster.open_for(1) is None  # To leave it out would cost more than it costs.
    assert cluster.fault("rack-1/2", "slow", 4.0).ok
    proposal = cluster.wait_for_proposal(1, 90.0)
    assert proposal.options[proposal.recommended].shape[1] == (0, 1, 3)
    cluster.check()
