"""A cluster whose ranks are threads of the test's process, with collectives in memory.

The engine runs as it is, above `Group`; only the library's process groups and the rendezvous are
replaced. A walk over many shapes then takes milliseconds a step. Every wait has a deadline.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from runtime.config import Config
from runtime.engine.group import Group
from runtime.engine.watch import Watch
from runtime.errors import GenerationAborted
from runtime.plan.generation import GenerationPlan
from tests.support.engine_pool import Cluster, RankFailed
from tests.support.engine_rank import Rank

DEADLINE_S = 20.0


@dataclass
class Pending:
    """An operation under way; `failed` says why it never will be done."""

    event: threading.Event = field(default_factory=threading.Event)
    failed: str = ""

    def wait(self, timeout: timedelta = timedelta(seconds=DEADLINE_S)) -> bool:
        if not self.event.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self.failed:
            raise RuntimeError(self.failed)
        return True

    def is_completed(self) -> bool:
        return self.event.is_set()


class Exchange:
    """One group's operations: the n-th of each member meet; the last to come carries them out."""

    def __init__(self, size: int, on_mismatch: Callable[[str], None]) -> None:
        """on_mismatch: told when members post what does not fit; most then wait for an abort."""
        self._size = size
        self._on_mismatch = on_mismatch
        self._lock = threading.Lock()
        self._posted: dict[int, dict[int, tuple[Any, ...]]] = defaultdict(dict)
        self._counts = [0] * size
        self._mail: dict[tuple[int, int], list[tuple[torch.Tensor, Pending, bool]]] = defaultdict(
            list
        )

    def all_to_all(self, me: int, inbox: Any, outbox: Any, received: Any, sent: Any) -> Pending:
        even = [outbox.numel() // self._size] * self._size
        pending = Pending()
        with self._lock:
            number = self._counts[me]
            self._counts[me] += 1
            posted = self._posted[number]
            posted[me] = (inbox, outbox, received or even, sent or even, pending)
            if len(posted) == self._size:
                self._deliver(posted)
                del self._posted[number]
        return pending

    def _deliver(self, posted: dict[int, tuple[Any, ...]]) -> None:
        parts = {rank: entry[1].split(entry[3]) for rank, entry in posted.items()}
        for rank, (inbox, _, received, _, pending) in posted.items():
            mine = [parts[peer][rank] for peer in range(self._size)]
            if [part.numel() for part in mine] == list(received):
                inbox.copy_(torch.cat(mine))
            else:
                pending.failed = "peers exchange other sizes"
                self._on_mismatch(f"a collective of {self._size}: {pending.failed}")
        for *_, pending in posted.values():
            pending.event.set()

    def post(self, src: int, dst: int, tensor: torch.Tensor, *, sends: bool) -> Pending:
        pending = Pending()
        with self._lock:
            box = self._mail[src, dst]
            if box and box[0][2] != sends:
                other, waiting, _ = box.pop(0)
                if other.shape != tensor.shape:
                    pending.failed = waiting.failed = "a message of another size"
                    self._on_mismatch(pending.failed)
                else:
                    (other if sends else tensor).copy_(tensor if sends else other)
                waiting.event.set()
                pending.event.set()
            else:
                box.append((tensor, pending, sends))
        return pending


@dataclass
class Backend:
    """One member's side of an `Exchange`, with the calls that `Group` makes of a process group."""

    exchange: Exchange
    me: int

    def alltoall_base(self, inbox: Any, outbox: Any, received: Any, sent: Any) -> Pending:
        return self.exchange.all_to_all(self.me, inbox, outbox, received, sent)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Pending:
        return self.exchange.post(self.me, peer, tensors[0], sends=True)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Pending:
        return self.exchange.post(peer, self.me, tensors[0], sends=False)


class Switchboard:
    """All exchanges by generation, group name and ranks; what did not fit in any, `mismatches`."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._exchanges: dict[tuple[Any, ...], Exchange] = {}
        self._abort = abort
        self.mismatches: list[str] = []
        self._lock = threading.Lock()

    def backend(self, key: tuple[Any, ...], size: int, me: int) -> Backend:
        with self._lock:
            fresh = Exchange(size, self._mismatched)
            return Backend(self._exchanges.setdefault(key, fresh), me)

    def _mismatched(self, what: str) -> None:
        """End it now: nobody would before a deadline."""
        self.mismatches.append(what)
        self._abort()


class ThreadBuilder:
    """Stands in for `GroupBuilder`."""

    def __init__(self, switchboard: Switchboard, gpu: str, watch: Watch) -> None:
        self._switchboard, self._gpu, self._watch = switchboard, gpu, watch

    def build(
        self, plan: GenerationPlan, wanted: Sequence[tuple[str, tuple[int, ...]]]
    ) -> list[Group]:
        me = plan.members().index(self._gpu)
        built = []
        for name, ranks in wanted:
            key = (plan.run, plan.generation, plan.digest(), name, ranks)
            backend = (
                self._switchboard.backend(key, len(ranks), ranks.index(me))
                if len(ranks) > 1
                else None
            )
            built.append(Group(ranks, me, self._watch, backend))
        return built

    def abandon(self, groups: Sequence[Group]) -> bool:
        """Nothing to free."""
        return True


class ThreadRank(Rank):
    """A rank without a pipe."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.on_trap: Callable[[], None] = lambda: None

    def _send(self, verdict: str, value: Any) -> None:
        self.on_trap()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


class ThreadPool:
    """What `Cluster` asks of a pool: ranks, here without processes."""

    def __init__(self, kind: Callable[[], ThreadRank]) -> None:
        self.store = SimpleNamespace(port=1)
        self.runs = 0
        self._kind = kind

    def take(self, count: int) -> list[Any]:
        return [self._kind() for _ in range(count)]

    def discard(self, ranks: Sequence[Any]) -> None:
        """Threads end with their command."""


class ThreadCluster(Cluster):
    """A `Cluster` of threads; each runs under the name of its GPU, to tell them apart by."""

    ranks: dict[str, Any]

    def __init__(
        self,
        config: Config,
        slots: Sequence[int],
        *,
        dtype: str = "float64",
        deadline_s: float = DEADLINE_S,
        kind: Callable[[], ThreadRank] = ThreadRank,
    ) -> None:
        self._deadline_s = deadline_s
        self._switchboard = Switchboard(self._abort_all)
        # One thread a rank, as all of a generation must be in its collectives at the same time.
        self._executor = ThreadPoolExecutor(sum(slots))
        super().__init__(ThreadPool(kind), config, slots, dtype=dtype)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the threads and take the ranks apart: autograd's hooks hold what they call in cycles
        that Python's collector does not see."""
        self._abort_all()
        self._executor.shutdown()
        for rank in self.ranks.values():
            rank.close()

    def call(self, commands: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        futures = self._run_all(commands)
        failed = [(gpu, f.exception()) for gpu, f in futures.items() if f.exception() is not None]
        if failed:
            # An error of its own says more than the abort that others saw because of it.
            failed.sort(key=lambda pair: isinstance(pair[1], GenerationAborted))
            gpu, error = failed[0]
            told = "; ".join([str(error), *self._switchboard.mismatches])
            raise RankFailed(gpu, type(error).__name__, told) from error
        return {gpu: future.result() for gpu, future in futures.items()}

    def errors(self, commands: Mapping[str, tuple[Any, ...]]) -> dict[str, BaseException]:
        """Run commands of which some may fail; what failed, by GPU."""
        done = self._run_all(commands)
        return {gpu: e for gpu, future in done.items() if (e := future.exception()) is not None}

    def _run_all(self, commands: Mapping[str, tuple[Any, ...]]) -> dict[str, Future[Any]]:
        """Run commands side by side until all have ended, by the deadline at the latest."""
        self._clear_aborts(commands)
        futures = {gpu: self._executor.submit(self._run_one, gpu, c) for gpu, c in commands.items()}
        alarm = threading.Timer(self._deadline_s, self._abort_all)
        alarm.start()
        wait(futures.values())
        alarm.cancel()
        return futures

    def _clear_aborts(self, commands: Mapping[str, tuple[Any, ...]]) -> None:
        """Before any thread begins: an abort that comes before a rank's turn still counts."""
        for gpu, (name, *_) in commands.items():
            if name == "enter":
                self.ranks[gpu].abort_event.clear()

    def _abort_all(self) -> None:
        for rank in self.ranks.values():
            rank.abort_event.set()

    def _run_one(self, gpu: str, command: tuple[Any, ...]) -> Any:
        threading.current_thread().name = gpu
        rank, (name, *arguments) = self.ranks[gpu], command
        try:
            value = getattr(rank, name)(*arguments)
        except Exception:
            self._abort_all()
            raise
        if name == "new":
            rank.engine._builder = ThreadBuilder(self._switchboard, gpu, rank.engine._watch)
        return value
