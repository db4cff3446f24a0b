"""A pool of rank processes that tests share, and plans over them.

One forkserver imports torch once; ranks are forked from it, reused from test to test, and replaced
when a test has killed them. Every wait has a deadline.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from runtime.config import Config
from runtime.layout.fractional import layout_for
from runtime.layout.takeover import home_holders
from runtime.plan.generation import GenerationPlan, Holders, ReplicaPlan, RollForward, Source
from tests.support import engine_rank

DEADLINE_S = 60.0


class RankFailed(AssertionError):
    """A command failed on a rank; `kind` is the type name of its error."""

    def __init__(self, gpu: str, kind: str, message: str) -> None:
        super().__init__(f"{gpu}: {kind}: {message}")
        self.kind = kind


@dataclass
class RankProcess:
    """One process of the pool and the pipe to it."""

    process: Any
    connection: Connection
    trapped: list[str] = field(default_factory=list)

    def send(self, name: str, *arguments: Any) -> None:
        self.connection.send((name, arguments))


class Pool:
    """Hands out rank processes; owns the store that every test's generations meet in."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.engine_rank"])
        self._ranks: list[RankProcess] = []
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.runs = 0

    def take(self, count: int) -> list[RankProcess]:
        """`count` living ranks, reused where possible."""
        self._ranks = [rank for rank in self._ranks if rank.process.is_alive()]
        while len(self._ranks) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=engine_rank.main, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(RankProcess(process, ours))
        return self._ranks[:count]

    def discard(self, ranks: Sequence[RankProcess]) -> None:
        """Kill ranks whose pipe may still hold answers."""
        for rank in ranks:
            rank.process.kill()
            rank.process.join(DEADLINE_S)
            rank.connection.close()
        self._ranks = [rank for rank in self._ranks if rank not in ranks]

    def close(self) -> None:
        self.discard(list(self._ranks))


@dataclass(frozen=True)
class Part:
    """One replica of a test: its live slots, samples, and its layout if not the takeover's."""

    live: tuple[int, ...]
    num_samples: int
    mode: str = "training"
    holders: Holders | None = None


class Cluster:
    """One run over pool ranks: `slots[i]` GPUs in rack i, generations entered one after another."""

    def __init__(
        self, pool: Pool, config: Config, slots: Sequence[int], *, dtype: str = "float64"
    ) -> None:
        self._pool = pool
        self.config = config
        self._dtype = dtype
        self.homes = [home_holders(config.model, count) for count in slots]
        self.racks = [tuple(f"r{i}/{s}" for s in range(count)) for i, count in enumerate(slots)]
        gpus = [gpu for rack in self.racks for gpu in rack]
        pool.runs += 1
        self._run = f"run-{pool.runs}"
        self.ranks = dict(zip(gpus, pool.take(len(gpus)), strict=True))
        self.generation = 0
        self.plan: GenerationPlan | None = None
        self.call({gpu: ("new", config, gpu, dtype) for gpu in gpus})

    def close(self) -> None:
        """Leave the pool in order: ranks that did not answer everything are not reused."""
        dead = [rank for rank in self.ranks.values() if not rank.process.is_alive()]
        dirty = [r for r in self.ranks.values() if r.process.is_alive() and r.connection.poll()]
        self._pool.discard([*dead, *dirty])

    def replace(self, gpu: str) -> None:
        """Start a fresh process for a GPU whose process died."""
        busy = set(map(id, self.ranks.values()))
        spare = next(r for r in self._pool.take(len(busy) + 1) if id(r) not in busy)
        self.ranks[gpu] = spare
        self.call({gpu: ("new", self.config, gpu, self._dtype)})

    def layouts(self) -> list[Holders]:
        """Current layout of every replica; the home layout before the first plan."""
        if self.plan is None:
            return self.homes
        return [replica.holders for replica in self.plan.replicas]

    def make_plan(
        self,
        parts: Sequence[Part],
        *,
        sources: Mapping[str, tuple[int, Holders]] | None = None,
        applied_step: int = 0,
        roll_forward: RollForward | None = None,
    ) -> GenerationPlan:
        """The next generation over `parts`.

        sources: GPU -> (replica, holders) whose state counts; by default every GPU of the last
            plan, on the layout of that plan.
        """
        self.generation += 1
        replicas = []
        for number, part in enumerate(parts):
            home, now = self.homes[number], self.layouts()[number]
            holders = part.holders
            if holders is None:
                holders = self._layout(home, now, part.live) if part.live else home
            replicas.append(
                ReplicaPlan(
                    replica=number,
                    rack=f"r{number}",
                    mode=part.mode if part.live else "out",
                    gpus=self.racks[number],
                    live=part.live,
                    holders=holders,
                    num_samples=part.num_samples,
                )
            )
        if sources is None and self.plan is not None:
            members = set(self.plan.members())
            sources = {
                gpu: (replica.replica, replica.holders)
                for replica in self.plan.replicas
                for gpu in replica.gpus
                if gpu in members
            }
        return GenerationPlan(
            run=self._run,
            generation=self.generation,
            store_host="127.0.0.1",
            store_port=self._pool.store.port,
            replicas=tuple(replicas),
            applied_step=applied_step,
            roll_forward=roll_forward,
            sources=tuple(
                Source(replica=n, gpus=(gpu,), slots=(self.racks[n].index(gpu),), holders=holders)
                for gpu, (n, holders) in (sources or {}).items()
            ),
        )

    def _layout(self, home: Holders, now: Holders, live: tuple[int, ...]) -> Holders:
        config = self.config
        return layout_for(config.model, config.train, len(self.homes), home, now, live)

    def enter(self, plan: GenerationPlan) -> dict[str, Any]:
        reports = self.call(dict.fromkeys(plan.members(), ("enter", plan)))
        self.plan = plan
        return reports

    def everyone(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Run one command on every member of the current plan."""
        assert self.plan is not None
        return self.call(dict.fromkeys(self.plan.members(), (name, *arguments)))

    def call(self, commands: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Send commands to GPUs and collect all answers; the first failure is raised."""
        self.send(commands)
        answers = self.collect(commands)
        for gpu, (verdict, value) in answers.items():
            if verdict == "failed":
                raise RankFailed(gpu, *value)
        return {gpu: value for gpu, (_, value) in answers.items()}

    def send(self, commands: Mapping[str, tuple[Any, ...]]) -> None:
        for gpu, command in commands.items():
            self.ranks[gpu].send(*command)

    def collect(self, gpus: Mapping[str, Any] | Sequence[str]) -> dict[str, tuple[str, Any]]:
        """One answer of each GPU: ("done", value), ("failed", (kind, message)), ("died", None)."""
        return self._receive(list(gpus), until_trapped=False)

    def await_trap(self, gpu: str) -> None:
        """Wait until `gpu` has reached its trap."""
        self._receive([gpu], until_trapped=True)

    def phase(self, gpu: str) -> str:
        """The phase that the rank's heartbeat would report, while it is busy."""
        self.ranks[gpu].send("phase")
        return str(self._receive([gpu], until_trapped=False)[gpu][1])

    def abort(self, gpus: Sequence[str]) -> None:
        for gpu in gpus:
            self.ranks[gpu].send("abort")

    def _receive(self, gpus: list[str], *, until_trapped: bool) -> dict[str, tuple[str, Any]]:
        deadline = time.monotonic() + DEADLINE_S
        answers: dict[str, tuple[str, Any]] = {}
        waiting = {self.ranks[gpu].connection: gpu for gpu in gpus}
        while waiting:
            readable = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            assert readable, f"no answer within {DEADLINE_S} s from {sorted(waiting.values())}"
            for connection in readable:
                gpu = waiting[connection]  # type: ignore[index]
                try:
                    verdict, value = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    verdict, value = "died", None
                if verdict == "trapped" and not until_trapped:
                    self.ranks[gpu].trapped.append(value)
                    continue
                answers[gpu] = (verdict, value)
                del waiting[connection]  # type: ignore[arg-type]
        return {gpu: answers[gpu] for gpu in gpus}
