"""Rank processes with nothing but an engine each: no controller, no agent, no stores.

Every process holds one engine per variant, so that variants can take turns on the same processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from runtime.config import Config
from runtime.engine.engine import Engine
from runtime.engine.reshard import ReshardSync
from runtime.engine.step import StepResult
from runtime.errors import CounterpoiseError
from runtime.plan.generation import GenerationPlan

DEADLINE_S = 40.0


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One thing to measure: a configuration and the generation it trains in."""

    config: Config
    plan: GenerationPlan


@dataclass(frozen=True, kw_only=True)
class Lap:
    """Some steps of one rank: wall seconds of each, what each reported, and the bytes one step
    handed over to slots of its own replica."""

    step_s: tuple[float, ...]
    steps: tuple[StepResult, ...]
    handed_over_bytes: int


class Ranks:
    """The parent's side: lets all members of a variant run some steps at the same time."""

    def __init__(self, connections: Mapping[str, Connection], variants: Mapping[str, Variant]):
        self._connections = connections
        self._variants = variants

    def lap(self, name: str, num_steps: int) -> dict[str, Lap]:
        """Run `num_steps` of variant `name` on its members; their laps by GPU.

        Raises:
            CounterpoiseError: a rank failed, or did not answer in time.
        """
        gpus = self._variants[name].plan.members()
        for gpu in gpus:
            self._connections[gpu].send((name, num_steps))
        waiting = {self._connections[gpu]: gpu for gpu in gpus}
        deadline = time.monotonic() + DEADLINE_S
        laps: dict[str, Lap] = {}
        while waiting:
            readable = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not readable:
                raise CounterpoiseError(f"{name}: no answer from {sorted(waiting.values())}")
            for connection in readable:
                gpu = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    answer: Any = self._connections[gpu].recv()
                except EOFError as error:
                    raise CounterpoiseError(f"{name}: {gpu} is gone") from error
                if isinstance(answer, str):
                    raise CounterpoiseError(f"{name}: {gpu}: {answer}")
                laps[gpu] = answer
        return laps


@contextlib.contextmanager
def running(variants: Mapping[str, Variant]) -> Iterator[Ranks]:
    """Processes for all members of all variants; the names of the runs must differ."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["runtime.bench.ranks"])
    placed = {
        name: Variant(
            config=variant.config,
            plan=msgspec.structs.replace(
                variant.plan, run=name, store_host="127.0.0.1", store_port=store.port
            ),
        )
        for name, variant in variants.items()
    }
    gpus = sorted({gpu for variant in placed.values() for gpu in variant.plan.members()})
    connections: dict[str, Connection] = {}
    processes = []
    try:
        for gpu in gpus:
            ours, theirs = context.Pipe()
            mine = {n: v for n, v in placed.items() if gpu in v.plan.members()}
            process = context.Process(target=_serve, args=(theirs, gpu, mine), daemon=True)
            process.start()
            theirs.close()
            connections[gpu] = ours
            processes.append(process)
        yield Ranks(connections, placed)
    finally:
        for process in processes:
            process.kill()
            process.join(DEADLINE_S)


def _serve(connection: Connection, gpu: str, variants: Mapping[str, Variant]) -> None:
    """A rank: enters a variant's generation when it is first asked for, then runs its steps."""
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    torch.set_num_threads(1)
    engines: dict[str, Engine] = {}
    while True:
        try:
            name, num_steps = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            if name not in engines:
                engines[name] = Engine(variants[name].config, gpu, abort=threading.Event())
                engines[name].enter(variants[name].plan)
            connection.send(_lap(engines[name], num_steps))
        except Exception as error:  # noqa: BLE001 (told to the parent, which ends the benchmark)
            connection.send(f"{type(error).__name__}: {error}")


def _lap(engine: Engine, num_steps: int) -> Lap:
    step_s: list[float] = []
    steps: list[StepResult] = []
    for _ in range(num_steps):
        began = time.perf_counter()
        steps.append(engine.step(before_commit=lambda: None))
        step_s.append(time.perf_counter() - began)
    sync: Any = engine.stepper.sync
    handed_over = sync.intra_replica_bytes if isinstance(sync, ReshardSync) else 0
    return Lap(step_s=tuple(step_s), steps=tuple(steps), handed_over_bytes=handed_over)
