"""Two kinds of ranks to lose: threads with collectives in memory, and processes with real ones.

Both are told commands and answer when they are done, dead or trapped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, Literal, Protocol

import msgspec

from runtime.config import ClusterConfig, Config, RackConfig
from runtime.errors import GenerationAborted
from tests.support.engine_checks import GQA, small_config
from tests.support.engine_pool import Cluster, Pool
from tests.support.engine_threads import ThreadCluster, ThreadRank

Command = tuple[Any, ...]
# GPU, what came of its command ("done", "failed", "died"; on the way "trapped"), and its word.
Arrival = tuple[str, str, Any]

SLOTS = (3, 2, 2)
BATCH = 7
DEADLINE_S = 30.0


def chaos_config(sync: Literal["direct", "reshard"]) -> Config:
    """Three replicas of 3, 2 and 2 slots: two lost ranks always leave a holder of every unit."""
    model = msgspec.structs.replace(GQA, num_layers=1, vocab_block=32)
    config = small_config(model, BATCH, sync)
    racks = tuple(RackConfig(name=f"r{i}", gpus=count) for i, count in enumerate(SLOTS))
    train = msgspec.structs.replace(config.train, state_hash_every=1)
    return msgspec.structs.replace(config, cluster=ClusterConfig(racks=racks), train=train)


class Host(Protocol):
    """Ranks that are told commands and answer when they do."""

    config: Config
    cluster: Cluster
    # Without news for so long after a fault, whoever can go on has done so.
    quiet_s: float

    def begin(self, commands: Mapping[str, Command]) -> None: ...

    def arrivals(self, timeout_s: float) -> list[Arrival]: ...

    def fence(self, gpu: str) -> None:
        """End a rank that hangs; it then is told as died."""
        ...

    def abort(self, gpus: Sequence[str]) -> None: ...


class Died(BaseException):
    """What a thread ends with that plays a killed process; nothing may catch it."""


class MortalRank(ThreadRank):
    """A thread that can be killed and hang."""

    def __init__(self) -> None:
        super().__init__()
        self.fenced = threading.Event()
        self.tell: Callable[[str], None] = lambda point: None

    def at(self, point: str) -> None:
        action = self._traps.pop(point, None)
        if action is None:
            return
        self.tell(point)
        if action == "hang":
            self.fenced.wait(DEADLINE_S)
        if action != "hold":
            raise Died
        self.abort_event.wait(DEADLINE_S)
        raise GenerationAborted(f"held at {point}")


class ThreadHost(ThreadCluster):
    """Ranks that are threads."""

    quiet_s = 0.03

    def __init__(self, config: Config) -> None:
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        super().__init__(config, SLOTS, kind=MortalRank)

    @property
    def cluster(self) -> Cluster:
        return self

    def begin(self, commands: Mapping[str, Command]) -> None:
        self._clear_aborts(commands)
        for gpu, command in commands.items():
            self.ranks[gpu].tell = lambda point, gpu=gpu: self._arrived.put((gpu, "trapped", point))
            self._executor.submit(self._carry_out, gpu, command)

    def _carry_out(self, gpu: str, command: Command) -> None:
        rank, (name, *arguments) = self.ranks[gpu], command
        try:
            self._arrived.put((gpu, "done", getattr(rank, name)(*arguments)))
        except Died:
            self._arrived.put((gpu, "died", None))
        except Exception as error:  # noqa: BLE001 (the test judges it)
            self._arrived.put((gpu, "failed", (type(error).__name__, str(error))))

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.fenced.set()
        super().close()

    def arrivals(self, timeout_s: float) -> list[Arrival]:
        try:
            return [self._arrived.get(timeout=timeout_s)]
        except queue.Empty:
            return []

    def fence(self, gpu: str) -> None:
        self.ranks[gpu].fenced.set()

    def abort(self, gpus: Sequence[str]) -> None:
        for gpu in gpus:
            self.ranks[gpu].abort_event.set()


class ProcessHost(Cluster):
    """Ranks that are processes with real collectives."""

    quiet_s = 0.2

    def __init__(self, pool: Pool, config: Config) -> None:
        self._busy: set[str] = set()
        super().__init__(pool, config, SLOTS)

    @property
    def cluster(self) -> Cluster:
        return self

    def begin(self, commands: Mapping[str, Command]) -> None:
        self.send(commands)
        self._busy |= set(commands)

    def arrivals(self, timeout_s: float) -> list[Arrival]:
        waiting = {self.ranks[gpu].connection: gpu for gpu in self._busy}
        found: list[Arrival] = []
        for connection in wait(list(waiting), timeout_s):
            gpu = waiting[connection]  # type: ignore[index]
            try:
                verdict, value = connection.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                verdict, value = "died", None
            if verdict != "trapped":
                self._busy.discard(gpu)
            found.append((gpu, verdict, value))
        return found

    def fence(self, gpu: str) -> None:
        self.ranks[gpu].process.kill()
