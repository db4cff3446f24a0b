"""Sends and receives over real connections, waited for with an eye on the abort flag."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from runtime.engine.group import Group
from runtime.engine.watch import Watch
from runtime.errors import GenerationAborted


class Pair:
    """Two members of one group, in one process."""

    def __init__(self) -> None:
        store = HashStore()
        self.aborts = [threading.Event(), threading.Event()]

        def member(rank: int) -> Group:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._threads = 1
            options._timeout = timedelta(seconds=20)
            watch = Watch(self.aborts[rank], abort_deadline_s=1.0)
            return Group((0, 1), rank, watch, dist.ProcessGroupGloo(store, rank, 2, options))

        with ThreadPoolExecutor(2) as threads:
            self.members = list(threads.map(member, range(2)))


def test_a_slow_message_arrives() -> None:
    """It takes longer than any slice of a wait, as a large one does."""
    first, second = Pair().members
    received = torch.zeros(4)
    receiving = first.start_receive(received, 1)
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(first.finish_messages, [receiving])
        with pytest.raises(TimeoutError):
            done.result(timeout=0.3)
        second.finish_messages([second.start_send(torch.arange(4.0), 0)])
        done.result(timeout=10.0)
    assert received.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert first.idle()
    assert second.idle()


def test_an_abort_ends_the_wait_for_a_message() -> None:
    pair = Pair()
    first = pair.members[0]
    receiving = first.start_receive(torch.zeros(4), 1)
    threading.Timer(0.1, pair.aborts[0].set).start()
    began = time.monotonic()
    with pytest.raises(GenerationAborted):
        first.finish_messages([receiving])
    assert time.monotonic() - began < 5.0
    assert not first.idle()
    # Nobody waits for the operation's own time limit at the end of the test.
    pair.members[1].finish_messages([pair.members[1].start_send(torch.zeros(4), 0)])
