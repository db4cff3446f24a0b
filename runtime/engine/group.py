"""Collectives of one process group, waited for with an eye on the abort flag.

On gloo a ring of n ranks takes 2 (n - 1) dependent hops, each two thread switches; where ranks
outnumber cores that, not the bytes, is the price. So small groups reduce by direct exchange: one
hop for small tensors (everybody gets all and sums in rank order), two for large ones (each sums its
chunk). All members get the same bits either way. Other backends and large groups use the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from runtime.engine.watch import Watch, Work

Op = Literal["sum", "max"]

# Direct exchange up to this many ranks; in one hop up to this many bytes received per rank.
_MAX_DIRECT_RANKS = 32
_MAX_ONE_HOP_BYTES = 1 << 20


@dataclass(slots=True)
class Reduction:
    """An all-reduce under way; `tensor` must be left alone until the group has finished it."""

    tensor: torch.Tensor
    op: Op
    stage: Literal["native", "gather", "scatter", "spread"]
    work: Work
    inbox: torch.Tensor


class Group:
    """Collectives over `ranks` (world ranks, ascending); a group of one does nothing at all.

    backend: the process group, None for a group of one.
    """

    def __init__(self, ranks: Sequence[int], me: int, watch: Watch, backend: Any) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(me)
        self.size = len(self.ranks)
        self._watch = watch
        self._backend = backend
        self._direct = not watch.streamed and self.size <= _MAX_DIRECT_RANKS
        self._open: list[Work] = []

    @property
    def streamed(self) -> bool:
        """Whether operations run on device streams, where groups must launch in one order."""
        return self._watch.streamed

    @property
    def device(self) -> torch.device:
        """Where the tensors of this group's collectives must be."""
        return torch.device("cuda" if self._watch.streamed else "cpu")

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum", *, on_host: bool = False) -> None:
        """In-place all-reduce; every member of the group must call it.

        on_host: return only when the result can be read on the host.
        """
        if self.size > 1:
            self.finish_all_reduce(self.start_all_reduce(tensor, op), on_host=on_host)

    def start_all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> Reduction:
        """Launch an in-place all-reduce of a contiguous tensor.

        Every member of the group (of more than one) must launch, advance and finish its reductions
        in the same order.

        Raises:
            GenerationAborted: aborted, or a peer is gone.
        """
        flat = tensor.view(-1)
        if not self._direct:
            options = dist.AllreduceOptions()
            kind: Any = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
            options.reduceOp = kind
            options.asyncOp = True
            work = self._start(lambda: self._backend.allreduce([tensor], options))
            return Reduction(flat, op, "native", work, flat)
        if self.size == 2 or self.size * flat.nbytes <= _MAX_ONE_HOP_BYTES:
            work, inbox = self._exchange(flat.repeat(self.size))
            return Reduction(flat, op, "gather", work, inbox)
        chunk = -(-flat.numel() // self.size)
        outbox = flat
        if chunk * self.size != flat.numel():
            outbox = flat.new_zeros(chunk * self.size)
            outbox[: flat.numel()] = flat
        work, inbox = self._exchange(outbox)
        return Reduction(flat, op, "scatter", work, inbox)

    def advance(self, reduction: Reduction) -> None:
        """Take a reduction of two hops to its second, so that several can overlap."""
        if reduction.stage == "scatter":
            self._finish(reduction.work)
            chunk = self._combine(reduction)
            reduction.work, reduction.inbox = self._exchange(chunk.repeat(self.size))
            reduction.stage = "spread"

    def poll(self, reduction: Reduction) -> bool:
        """Whether the reduction can be finished without a wait; takes it as far as it can come."""
        if reduction.stage == "scatter" and reduction.work.is_completed():
            self.advance(reduction)
        return reduction.stage != "scatter" and reduction.work.is_completed()

    def finish_all_reduce(self, reduction: Reduction, *, on_host: bool = False) -> None:
        """Wait until `reduction.tensor` holds the result."""
        self.advance(reduction)
        self._finish(reduction.work, on_host=on_host)
        if reduction.stage == "gather":
            reduction.tensor.copy_(self._combine(reduction))
        elif reduction.stage == "spread":
            reduction.tensor.copy_(reduction.inbox[: reduction.tensor.numel()])

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every member's `tensor` (equal shapes) as `(size, *shape)`; every member calls it."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        if self._direct:
            work, out = self._exchange(tensor.reshape(-1).repeat(self.size))
            self._finish(work)
            return out.view(self.size, *tensor.shape)
        out = tensor.new_empty((self.size, *tensor.shape))
        self._finish(self._start(lambda: self._backend.allgather([list(out)], [tensor])))
        return out

    def start_exchange(
        self, outbox: torch.Tensor, sent: list[int], inbox: torch.Tensor, received: list[int]
    ) -> Work:
        """Launch an all-to-all of unequal parts; every member calls it, also with nothing to send.

        sent, received: elements for and from each group rank, adding up to `outbox` and `inbox`,
        which must be left alone until `finish` has returned.
        """
        return self._start(lambda: self._backend.alltoall_base(inbox, outbox, received, sent))

    def finish(self, work: Work) -> None:
        """Wait for a launched exchange; raises GenerationAborted."""
        self._finish(work)

    def barrier(self) -> None:
        """Return once every member has called it."""
        self.all_reduce(torch.zeros(1, device=self.device), on_host=True)

    def start_send(self, tensor: torch.Tensor, peer: int) -> Work:
        """Launch a send to group rank `peer`, which must post the matching receive."""
        return self._start(lambda: self._backend.send([tensor], peer, 0))

    def start_receive(self, tensor: torch.Tensor, peer: int) -> Work:
        """Launch a receive from group rank `peer` into `tensor`."""
        return self._start(lambda: self._backend.recv([tensor], peer, 0))

    def finish_messages(self, works: Sequence[Work]) -> None:
        """Wait for launched sends and receives; raises GenerationAborted."""
        self._watch.wait_messages(works)
        for work in works:
            self._open.remove(work)

    def idle(self) -> bool:
        """Whether dropping the group is free of waiting: nothing is under way."""
        return all(work.is_completed() for work in self._open)

    def _combine(self, reduction: Reduction) -> torch.Tensor:
        rows = reduction.inbox.view(self.size, -1)
        return rows.sum(0) if reduction.op == "sum" else rows.amax(0)

    def _exchange(self, outbox: torch.Tensor) -> tuple[Work, torch.Tensor]:
        """Send the i-th of `size` equal parts to rank i; the inbox is ordered by sender."""
        inbox = torch.empty_like(outbox)
        return self._start(lambda: self._backend.alltoall_base(inbox, outbox, [], [])), inbox

    def _start(self, launch: Callable[[], Work]) -> Work:
        self._watch.check()
        try:
            work = launch()
        except RuntimeError as error:
            self._watch.peer_lost(error)
            raise
        self._open.append(work)
        return work

    def _finish(self, work: Work, *, on_host: bool = False) -> None:
        self._watch.wait(work, on_host=on_host)
        self._open.remove(work)
