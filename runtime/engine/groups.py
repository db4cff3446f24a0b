"""Process groups of one generation, built without a default group and left without a teardown.

Every key in the store carries run and generation, so a late rank cannot meet the wrong peers. A
group that is abandoned with an operation under way is kept until that operation times out:
destroying it earlier would block on its thread.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from runtime.engine.group import Group
from runtime.engine.watch import Watch
from runtime.errors import DigestMismatch, GenerationAborted
from runtime.plan.generation import GenerationPlan

_DROP_AFTER_S = 0.5
_LOG = logging.getLogger(__name__)


class GroupBuilder:
    """Builds the groups of one generation after another for this process.

    timeout_s: after how long an abandoned operation frees its thread; no recovery waits for it.
    join_deadline_s: how long to wait for the other members before giving the generation up.
    """

    def __init__(
        self, gpu: str, backend: str, watch: Watch, *, timeout_s: float, join_deadline_s: float
    ) -> None:
        self._gpu = gpu
        self._backend = backend
        self._watch = watch
        self._timeout = timedelta(seconds=timeout_s)
        self._join_deadline_s = join_deadline_s
        self._devices: dict[str, object] = {}
        self._abandoned: list[Group] = []
        self._store: tuple[tuple[str, int], TCPStore] | None = None
        self._thread: threading.Thread | None = None

    def build(
        self, plan: GenerationPlan, wanted: Sequence[tuple[str, tuple[int, ...]]]
    ) -> list[Group]:
        """Meet all members of `plan`, then build the groups `wanted` as (name, world ranks).

        Every member must list the groups it shares with others in the same relative order. The work
        is done by a thread, because library calls in it block; an abort leaves that thread behind.

        Raises:
            GenerationAborted: aborted, or somebody did not come in time.
            DigestMismatch: the members do not hold the same plan.
        """
        self.prune()
        built: list[Group] = []
        failure: list[BaseException] = []
        done = threading.Event()

        def construct() -> None:
            try:
                self._construct(plan, wanted, built)
            except Exception as error:  # noqa: BLE001 (handed to the caller's thread below)
                failure.append(error)
            done.set()

        if self._thread is not None and self._thread.is_alive():
            # Left behind by an abort, it may sit on the connection until a time limit.
            self._store = None
        self._thread = threading.Thread(
            target=construct, name=f"groups-{plan.generation}", daemon=True
        )
        self._thread.start()
        self._watch.wait_event(done)
        if not failure:
            return built
        error = failure[0]
        if isinstance(error, (GenerationAborted, DigestMismatch)):
            raise error
        if isinstance(error, (RuntimeError, OSError)):
            self._store = None
            self._watch.peer_lost(error)
        raise error

    def connect(self, host: str, port: int) -> None:
        """Connect to the store ahead of the first generation; a failure is left to `build`."""
        try:
            self._connection(host, port)
        except RuntimeError as error:
            _LOG.warning("store at %s:%d cannot be reached yet: %s", host, port, error)

    def abandon(self, groups: list[Group]) -> bool:
        """Let go of a generation's groups without waiting for what is under way in them.

        groups: taken over; the list is empty afterwards.

        Returns:
            Whether all that were ever abandoned have come to rest.
        """
        self._abandoned += groups
        groups.clear()
        return self.prune()

    def prune(self) -> bool:
        """Free abandoned groups that have come to rest; whether those were all.

        A thread does it, and later: to destroy a group ends its threads and connections, tens of
        milliseconds that a generation which is just being entered need not wait for.
        """
        resting: list[Group] = []
        busy: list[Group] = []
        for group in self._abandoned:
            (resting if group.idle() else busy).append(group)
        self._abandoned = busy
        if resting:
            # The timer holds the last reference to the groups: whoever empties the list frees them.
            timer = threading.Timer(_DROP_AFTER_S, resting.clear)
            timer.daemon = True
            timer.start()
        return not self._abandoned

    def _construct(
        self,
        plan: GenerationPlan,
        wanted: Sequence[tuple[str, tuple[int, ...]]],
        built: list[Group],
    ) -> None:
        members = plan.members()
        me = members.index(self._gpu)
        if len(members) == 1:
            built += [Group(ranks, me, self._watch, None) for _, ranks in wanted]
            return
        store = self._connection(plan.store_host, plan.store_port)
        prefix = PrefixStore(f"{plan.run}/{plan.generation}", store)
        self._meet(prefix, plan, len(members))
        for name, ranks in wanted:
            if len(ranks) == 1:
                built.append(Group(ranks, me, self._watch, None))
                continue
            self._watch.check()
            backend = self._process_group(plan, PrefixStore(name, prefix), name, ranks, me)
            built.append(Group(ranks, me, self._watch, backend))

    def _connection(self, host: str, port: int) -> TCPStore:
        """The client of the store, kept for all generations.

        Connecting looks up the peer's name, which can stall for seconds where DNS is slow.
        """
        if self._store is None or self._store[0] != (host, port):
            store = TCPStore(host, port, is_master=False, timeout=self._timeout)
            self._store = ((host, port), store)
        return self._store[1]

    def _meet(self, store: Store, plan: GenerationPlan, count: int) -> None:
        """Wait until all members are there, each with the same plan."""
        digest = plan.digest()
        if store.compare_set("digest", "", digest).decode() != digest:
            store.set("mismatch", self._gpu)
        store.add("arrived", 1)
        deadline = time.monotonic() + self._join_deadline_s
        while store.add("arrived", 0) < count:
            if time.monotonic() > deadline:
                raise GenerationAborted(
                    f"generation {plan.generation}: {store.add('arrived', 0)} of {count} members "
                    f"came within {self._join_deadline_s:g} s"
                )
            self._watch.pause(0.005)
        if store.check(["mismatch"]):
            raise DigestMismatch(
                f"generation {plan.generation}: {store.get('mismatch').decode()} holds another plan"
            )

    def _process_group(
        self,
        plan: GenerationPlan,
        store: Store,
        name: str,
        ranks: tuple[int, ...],
        me: int,
    ) -> Any:
        position = ranks.index(me)
        options: Any
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [self._gloo_device(plan)]
            options._threads = 1
        options._timeout = self._timeout
        options.global_ranks_in_group = list(ranks)
        options.group_name = f"{plan.run}/{plan.generation}/{name}"
        kind: Any = dist.ProcessGroupNCCL if self._backend == "nccl" else dist.ProcessGroupGloo
        return kind(store, position, len(ranks), options)

    def _gloo_device(self, plan: GenerationPlan) -> object:
        """One device (and its thread) per process, on the address that reaches the store's host."""
        if plan.store_host not in self._devices:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((plan.store_host, plan.store_port))
                address = probe.getsockname()[0]
            self._devices[plan.store_host] = dist.ProcessGroupGloo.create_device(hostname=address)
        return self._devices[plan.store_host]
