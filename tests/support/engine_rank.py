"""The process on the far side of a test's pipe: one rank with its engine, driven by commands."""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from runtime.config import Config
from runtime.engine.checkpoint import write_part
from runtime.engine.engine import Engine, EnterReport
from runtime.engine.state import State
from runtime.engine.step import StepResult
from runtime.errors import GenerationAborted
from runtime.plan.generation import GenerationPlan, Standing
from runtime.plan.manifest import Part


class Rank:
    """Carries out commands; also the engine's fail points, so a test can stop a rank anywhere."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._abort = threading.Event()
        self._engine: Engine | None = None
        self._closed: list[Engine] = []
        self._traps: dict[str, str] = {}
        self._spoilt_runs = 0
        self._lock = threading.Lock()

    @property
    def abort_event(self) -> threading.Event:
        return self._abort

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def new(self, config: Config, gpu: str, dtype: str) -> None:
        closed = [*self._closed, *([self._engine] if self._engine is not None else [])]
        self._closed = [engine for engine in closed if not engine.close()]
        self._traps = {}
        self._abort.clear()
        self._engine = Engine(
            config, gpu, abort=self._abort, dtype=getattr(torch, dtype), fail_points=self
        )

    def trap(self, point: str, action: str) -> None:
        """At the next pass of `point`: "kill" this process, "hold" here until an abort, or "hang"
        here for good."""
        self._traps[point] = action

    def spoil(self, runs: int, layer: int) -> None:
        """In the next `runs` runs of a step this slot adds a NaN in the MLP of `layer`."""
        model = self.engine.stepper.model
        assert model is not None
        mlp, self._spoilt_runs = model._mlp, runs + 1

        def spoilt(x: torch.Tensor, at: int, *more: Any) -> torch.Tensor:
            out = mlp(x, at, *more)
            return out * torch.nan if at == layer and self._spoilt_runs > 0 else out

        model._mlp = spoilt  # type: ignore[method-assign]

    def spoil_gradient(self) -> None:
        """From now on the gradient of this slot's last `down` has a NaN; its loss does not."""
        model = self.engine.stepper.model
        assert model is not None
        layer = max(at for name, at in model._leaves if name == "down")
        model._leaves["down", layer].register_hook(lambda grad: grad * torch.nan)

    def at(self, point: str) -> None:
        if point == "step.start" and self._spoilt_runs > 0:
            self._spoilt_runs -= 1
        action = self._traps.pop(point, None)
        if action is None:
            return
        self._send("trapped", point)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "hang":
            threading.Event().wait()
        self._abort.wait()
        raise GenerationAborted(f"held at {point}")

    def enter(self, plan: GenerationPlan) -> EnterReport:
        """Whoever passes the command on has cleared the abort, which may come again before this
        begins."""
        return self.engine.enter(plan)

    def steps(self, count: int) -> list[StepResult]:
        return [self.engine.step(before_commit=lambda: None) for _ in range(count)]

    def standing(self) -> Standing:
        return self.engine.standing()

    def work_fraction(self) -> float:
        return self.engine.work_fraction()

    def save(self, folder: Path) -> Part:
        """Write this rank's part of a checkpoint."""
        return write_part(folder, "part-" + self.engine.standing().gpu, self.engine.copy_part())

    def units(self) -> dict[tuple[str, int, int], Any]:
        assert self.engine.state is not None
        return {key: value.numpy() for key, value in self.engine.state.units().items()}

    def reduce_ids(self) -> dict[tuple[str, int, int], Any]:
        """Synchronise ids instead of gradients: element e of a logical parameter counts e + 1."""
        state, sync = self.engine.state, self.engine.stepper.sync
        assert state is not None
        for number, parameter in enumerate(state.layout.parameters):
            size = parameter.row_elements
            for row, unit in enumerate(state.layout.held[parameter.family]):
                ids = torch.arange(size) + (number * 1_000_000 + unit * size + 1)
                state.rows(state.grads, number)[row] = ids.view(parameter.row).to(state.grads.dtype)
        sync.begin()
        sync.finish()
        return {
            (parameter.name, parameter.layer, unit): state.rows(state.grads, number)[row].numpy()
            for number, parameter in enumerate(state.layout.parameters)
            for row, unit in enumerate(state.layout.held[parameter.family])
        }

    def damage(self, family: str, value: float | None = None) -> None:
        """Change one element of one held unit to `value`, or by 1e-12, as a defect would."""
        state: State | None = self.engine.state
        assert state is not None
        number = next(n for n, p in enumerate(state.layout.parameters) if p.family == family)
        row = state.rows(state.params, number)[0].flatten()
        row[0] = row[0] + 1e-12 if value is None else value

    def _send(self, verdict: str, value: Any) -> None:
        with self._lock:
            self._connection.send((verdict, value))

    def serve(self) -> None:
        """Read on a thread, so that an abort reaches a rank that is busy in a step."""
        commands: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()

        def read() -> None:
            try:
                while True:
                    name, arguments = self._connection.recv()
                    if name == "enter":
                        self._abort.clear()
                    if name == "abort":
                        self._abort.set()
                    elif name == "phase":
                        self._send("phase", self.engine.phase)
                    else:
                        commands.put((name, arguments))
            except (EOFError, OSError):
                commands.put(None)

        threading.Thread(target=read, daemon=True).start()
        while (command := commands.get()) is not None:
            name, arguments = command
            try:
                self._send("done", getattr(self, name)(*arguments))
            except Exception as error:  # noqa: BLE001 (the test judges it)
                detail = "" if isinstance(error, GenerationAborted) else traceback.format_exc()
                self._send("failed", (type(error).__name__, f"{error}\n{detail}"))
        # Groups abandoned in mid-operation must not be destroyed on the way out.
        os._exit(0)


def main(connection: Connection) -> None:
    # A store client looks up its peer's name on connecting; a lost reply must not cost 5 s.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    torch.set_num_threads(1)
    # A rank that hangs can be asked where.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    Rank(connection).serve()
