"""Process groups of one generation, built without a default group and left without a teardown.

Every key in the store carries run and generation, so a late rank cannot meet the wrong peers. A
group that is abandoned with an operation under way is kept until that operation times out:
destroying it earlier would block on its thread.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from runtime.engine.watch import Watch, Work
from runtime.errors import DigestMismatch, GenerationAborted
from runtime.plan.generation import GenerationPlan


class Group:
    """Collectives over `ranks` (world ranks, ascending); a group of one does nothing at all."""

    def __init__(self, ranks: Sequence[int], me: int, watch: Watch, backend: Any):
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(me)
        self.size = len(self.ranks)
        self._watch = watch
        self._backend = backend
        self._open: list[Work] = []

    def start_all_reduce(self, tensor: torch.Tensor, op: Any) -> Work:
        """Launch an in-place all-reduce; every member of the group must call it in the same order.

        Raises:
            GenerationAborted: a peer is gone.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = op
        options.asyncOp = True
        return self._start(lambda: self._backend.allreduce([tensor], options))

    def finish(self, work: Work, *, on_host: bool = False) -> None:
        """Wait for a launched operation; raises GenerationAborted."""
        self._watch.wait(work, on_host=on_host)
        self._open.remove(work)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        *,
        on_host: bool = False,
    ) -> None:
        """In-place all-reduce over the group; every member must call it."""
        if self.size > 1:
            self.finish(self.start_all_reduce(tensor, op), on_host=on_host)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every member's `tensor` (equal shapes) as `(size, *shape)`; every member calls it."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        out = tensor.new_empty((self.size, *tensor.shape))
        self.finish(self._start(lambda: self._backend.allgather([list(out)], [tensor])))
        return out

    def start_send(self, tensor: torch.Tensor, peer: int) -> Work:
        """Launch a send to group rank `peer`, which must post the matching receive."""
        return self._start(lambda: self._backend.send([tensor], peer, 0))

    def start_receive(self, tensor: torch.Tensor, peer: int) -> Work:
        """Launch a receive from group rank `peer` into `tensor`."""
        return self._start(lambda: self._backend.recv([tensor], peer, 0))

    def barrier(self) -> None:
        """Return once every member has called it."""
        device = "cuda" if self._watch.streamed else "cpu"
        self.all_reduce(torch.zeros(1, device=device), on_host=True)

    def idle(self) -> bool:
        """Whether dropping the group is free of waiting: nothing is under way."""
        return all(work.is_completed() for work in self._open)

    def _start(self, launch: Callable[[], Work]) -> Work:
        self._watch.check()
        try:
            work = launch()
        except RuntimeError as error:
            self._watch.peer_lost(error)
            raise
        self._open.append(work)
        return work


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

        thread = threading.Thread(target=construct, name=f"groups-{plan.generation}", daemon=True)
        thread.start()
        self._watch.wait_event(done)
        if not failure:
            return built
        error = failure[0]
        if isinstance(error, (GenerationAborted, DigestMismatch)):
            raise error
        if isinstance(error, (RuntimeError, OSError)):
            self._watch.peer_lost(error)
        raise error

    def abandon(self, groups: Sequence[Group]) -> None:
        """Let go of a generation's groups without waiting for what is under way in them."""
        self._abandoned += groups
        self.prune()

    def prune(self) -> None:
        """Free abandoned groups that have come to rest."""
        self._abandoned = [group for group in self._abandoned if not group.idle()]

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
        store = TCPStore(plan.store_host, plan.store_port, is_master=False, timeout=self._timeout)
        prefix = PrefixStore(f"{plan.run}/{plan.generation}", store)
        self._meet(prefix, plan, len(members))
        for name, ranks in wanted:
            if len(ranks) == 1:
                built.append(Group(ranks, me, self._watch, None))
                continue
            self._watch.check()
            backend = self._process_group(plan, PrefixStore(name, prefix), name, ranks, me)
            built.append(Group(ranks, me, self._watch, backend))

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
