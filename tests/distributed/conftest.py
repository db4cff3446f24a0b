"""Real gloo ranks, shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.engine_pool import Cluster, Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def cluster(pool: Pool) -> Iterator[Callable[..., Cluster]]:
    """Make clusters; see `Cluster`."""
    made: list[Cluster] = []

    def make(*arguments: Any, **keywords: Any) -> Cluster:
        made.append(Cluster(pool, *arguments, **keywords))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Ranks that are threads must not each ask for all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
