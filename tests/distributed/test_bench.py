"""The benchmarks measure what they say: real workers, real kills, real commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

from runtime.bench import parity, recovery, startup, sync
from runtime.bench.benchmark import Benchmark
from runtime.config import ClusterConfig, Config, EmulatedConfig, RackConfig


def missed(benchmark: Benchmark, figures: dict[str, object]) -> list[str]:
    return [
        f"{target.figure} is {figures.get(target.figure)}, not {target.at_most:g} or less"
        for target in benchmark.targets(figures)
        if not target.is_reached(figures)
    ]


def silent(_: str) -> None:
    """Progress is for people."""


def test_parity_through_kills_shrinks_and_a_grow() -> None:
    figures = parity.measure(silent)
    assert not missed(parity.BENCHMARK, figures)
    assert figures["steps"] == parity.STEPS
    assert figures["generations"] == 6, figures["causes"]


def test_recovery_on_a_small_shape() -> None:
    config = Config(
        cluster=ClusterConfig(
            racks=(RackConfig(name="rack-0", gpus=2), RackConfig(name="rack-1", gpus=2))
        ),
        emulated=EmulatedConfig(step_s=0.4),
    )
    loss = recovery.Loss(gpu="rack-1/0", kill_at=0.5, approve_at=0.5)
    figures = recovery.measure_losses(config, [loss], silent)
    assert not missed(recovery.BENCHMARK, figures)
    assert figures["repeats"] == len(figures["raw"]) == 1


def test_sync_counts_and_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "ROUNDS", 2)
    figures = sync.measure(silent)
    # Times say little after two rounds; `measure` itself checks the bytes against the plan.
    assert figures["intra_rack_bytes_direct"] == 0 < figures["intra_rack_bytes_reshard"]
    assert len(figures["raw_step_s"]["uniform"]) == 2
    assert 0 < figures["exposed_s_direct"] < figures["step_s_direct"]
    assert 0 < figures["exposed_s_reshard"] < figures["step_s_reshard"]


def test_startup_leaves_nothing_running() -> None:
    figures = startup.measure(silent)
    assert figures["exit_code"] == 0
    assert figures["leftover"] == []
    assert figures["recorded_as"] == "stopped"
    assert 0 < figures["health_s"] <= figures["dashboard_s"]
    assert figures["first_commit_s"] > 0


FIRST_STEP = """
import sys, threading
from runtime.config import Config
from runtime.engine.engine import Engine
from runtime.layout.takeover import home_holders
from runtime.plan.generation import GenerationPlan, ReplicaPlan

config = Config()
replica = ReplicaPlan(
    replica=0, rack="r", mode="training", gpus=("r/0",), live=(0,), num_samples=1,
    holders=home_holders(config.model, 1),
)
engine = Engine(config, "r/0", abort=threading.Event())
engine.enter(
    GenerationPlan(run="r", generation=1, store_host="", store_port=0, replicas=(replica,))
)
engine.step(before_commit=lambda: None)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"sympy", "torchvision"}))
"""


def test_first_step_imports_nothing_large() -> None:
    """What a first step imports, every worker imports, at the same time and on the same cores."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_STEP], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
