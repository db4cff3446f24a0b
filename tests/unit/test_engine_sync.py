"""What of the gradient sync is hidden behind backward, and what the step reports as exposed."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import msgspec
import torch

from runtime.engine.engine import Engine
from runtime.engine.group import Group
from runtime.engine.passage import Lanes
from runtime.engine.reshard import ReshardSync
from runtime.engine.stopwatch import Stopwatch
from runtime.engine.sync import DirectSync, GradientSync
from runtime.engine.watch import Watch
from runtime.layout.move import Flow
from runtime.layout.reshard import reshard_plan, stages
from runtime.layout.sync import SyncGroup, buckets
from runtime.layout.units import FAMILIES, num_units
from tests.support.engine_checks import GQA, small_config
from tests.support.engine_layouts import mixed_plan

LATE_S = 0.15


@dataclass
class Pending:
    """An operation that is done when its event says so."""

    event: threading.Event

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if not self.event.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")
        return True

    def is_completed(self) -> bool:
        return self.event.is_set()


@dataclass
class Echo:
    """A backend whose peers all send what we send; operations end at once or after a delay.

    order: the tensors' sizes in the order of launch.
    """

    delay_s: float = 0.0
    order: list[int] = field(default_factory=list)

    def alltoall_base(self, inbox: Any, outbox: Any, received: Any, sent: Any) -> Pending:
        self.order.append(outbox.numel())
        inbox.copy_(outbox) if outbox.numel() == inbox.numel() else inbox.zero_()
        done = threading.Event()
        if self.delay_s:
            threading.Timer(self.delay_s, done.set).start()
        else:
            done.set()
        return Pending(done)


@dataclass
class Spy:
    """Passes everything on and remembers how much was launched before `finish`."""

    sync: Any
    backends: list[Echo]
    launched: int = 0

    def begin(self) -> None:
        self.sync.begin()

    def ready(self, numbers: Any) -> None:
        self.sync.ready(numbers)

    def finish(self) -> None:
        self.launched = sum(len(backend.order) for backend in self.backends)
        self.sync.finish()


def run_step(make: Any) -> tuple[Any, Spy]:
    """One step of a lone rank whose gradient sync `make(state, group of two)` builds."""
    config = small_config(GQA)
    plan = mixed_plan(GQA, [1], [[0]])
    engine = Engine(config, "r0/0", abort=threading.Event(), dtype=torch.float64)
    replica = msgspec.structs.replace(plan.replicas[0], num_samples=2)
    engine.enter(msgspec.structs.replace(plan, replicas=(replica,)))
    state, stepper = engine.state, engine.stepper
    assert state is not None
    assert stepper.model is not None
    spy = make(state, stepper.watch)
    stepper.model.on_gradient(spy.ready)
    return replace(stepper, sync=spy).run(lambda: None), spy


def direct(late_s: float) -> Any:
    def make(state: Any, watch: Watch) -> Spy:
        backend = Echo(late_s)
        units = {family: tuple(range(num_units(GQA, family))) for family in FAMILIES}
        cut = buckets(GQA, [SyncGroup(0, (0, 1), units)], 2000)
        sync: GradientSync = DirectSync(cut, {0: Group((0, 1), 0, watch, backend)}, state)
        return Spy(sync, [backend])

    return make


def reshard(late_s: float) -> Any:
    def make(state: Any, watch: Watch) -> Spy:
        """Two replicas of a slot each; another slot of ours hands over and takes back one unit."""
        out, back, across = Echo(late_s), Echo(late_s), Echo(late_s)
        lanes = Lanes(
            Group((0, 1), 0, watch, out),
            Group((0, 1), 0, watch, back),
            {0: Group((0, 2), 0, watch, across)},
        )
        groups = reshard_plan(GQA, mixed_plan(GQA, [1, 1], [[0], [0]])).groups[:-1]
        groups = (replace(groups[0], ranks=(0, 2)),)
        one = dict.fromkeys(FAMILIES, ()) | {"mlp": (0,)}
        sync = ReshardSync(
            stages(GQA, groups, 2000),
            groups,
            [Flow(1, 0, one)],
            state,
            lanes,
            DirectSync([], {}, state),
        )
        return Spy(sync, [out, back, across])

    return make


def test_direct_hides_behind_backward_and_reports_the_rest() -> None:
    hidden, spy = run_step(direct(0.0))
    assert spy.launched > 1
    exposed, _ = run_step(direct(LATE_S))
    # Launched within the few milliseconds of this backward, which hide their part.
    assert hidden.exposed_sync_s < LATE_S / 2 < exposed.exposed_sync_s < 2 * LATE_S


def test_reshard_runs_all_three_hops_behind_backward() -> None:
    hidden, spy = run_step(reshard(0.0))
    out, back, across = spy.backends
    assert len(out.order) == len(back.order) == len(across.order) > 2
    assert spy.launched == 3 * len(out.order)
    exposed, _ = run_step(reshard(LATE_S))
    # One hop after the other, but those of all stages at once.
    assert hidden.exposed_sync_s < LATE_S < 2.5 * LATE_S < exposed.exposed_sync_s < 4 * LATE_S


def test_a_stopwatch_measures_its_block_only() -> None:
    watch = Stopwatch(streamed=False)
    began = time.perf_counter()
    with watch.running():
        sum(range(1000))
    assert 0.0 < watch.seconds <= time.perf_counter() - began
