"""Goodput: what each policy commits of the ideal over ten minutes of kills and repairs.

A discrete simulation with the project's own planner, cost model and ledger, so that it takes
seconds; what a change costs is measured first on a real run of the same config, and the simulator
is held against that run's own goodput.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from runtime.bench.benchmark import Benchmark, Figures, Say, Target
from runtime.bench.drill import START_DEADLINE_S, Drill
from runtime.config import ClusterConfig, Config, EmulatedConfig, PolicyConfig, RackConfig
from runtime.control.local import LocalRun
from runtime.plan.cost import Calibration
from runtime.plan.simulate import ChangeCosts, Outage, SimulatedPolicy, fault_trace, simulate
from storage.records import GenerationFormed, StepCommitted

SECONDS = 600.0
EVERY_S = 30.0
REPAIR_S = 60.0
SEEDS = (1, 2, 3, 4, 5)
STEP_S = 1.0

# What peers pay for a failure, from `bench peers` and the measurement log: torchft's heartbeat
# time limits; a torchrun restart with torch imported anew, one checkpoint every 10 steps.
# Their planned changes were not measured: assumed, in their favour.
PEER_COSTS = {
    "torchft": ChangeCosts(detect_s=5.0, forced_s=0.05, planned_s=0.5),
    "torchft_tuned": ChangeCosts(detect_s=1.0, forced_s=0.05, planned_s=0.5),
    "restart": ChangeCosts(detect_s=0.1, forced_s=2.0, planned_s=2.0, checkpoint_every=10),
}
# GPU, seconds after the start of the window when it is killed and repaired; the window's length.
CHECK = (("rack-0/1", 0.5, 13.5), ("rack-1/2", 7.5, None))
CHECK_S = 22.0


class Checked(NamedTuple):
    """What the real run gave. outages: as it met them, seconds since the window began."""

    goodput: float
    seconds: float
    outages: tuple[Outage, ...]
    costs: ChangeCosts
    overhead_s: float


def config() -> Config:
    """4 replicas of 4 slots; what is proposed is done at once."""
    racks = tuple(RackConfig(name=f"rack-{index}", gpus=4) for index in range(4))
    return Config(
        name="goodput",
        cluster=ClusterConfig(racks=racks),
        emulated=EmulatedConfig(step_s=STEP_S),
        policy=PolicyConfig(shrink="auto", grow="auto", drop="auto"),
    )


def measure(say: Say) -> dict[str, Any]:
    wanted = config()
    say("a real run of the same config, for the costs of a change and to check the simulator")
    checked = real(wanted)
    calibration = Calibration(overhead_s=checked.overhead_s)
    again = simulate(
        wanted, checked.outages, "boost", checked.costs,
        seconds=checked.seconds, calibration=calibration,
    )  # fmt: skip
    # Both from the start of the window to a commit: a whole step is a twentieth of it.
    simulated = again.goodput * checked.seconds / again.last_commit_at
    say(f"goodput of the real run {checked.goodput:.3f}, simulated {simulated:.3f}")
    figures = policies(wanted, checked.costs, calibration)
    return figures | {
        "check_goodput_real": round(checked.goodput, 4),
        "check_goodput_simulated": round(simulated, 4),
        "check_error": round(abs(checked.goodput - simulated), 4),
        "measured_costs": msgspec.structs.asdict(checked.costs),
        "overhead_s": round(checked.overhead_s, 4),
        "peer_costs": {name: msgspec.structs.asdict(each) for name, each in PEER_COSTS.items()},
    }


def policies(wanted: Config, costs: ChangeCosts, calibration: Calibration) -> dict[str, Any]:
    """Goodput by policy, means over the traces; all meet the same ones."""
    free = ChangeCosts()
    plan: dict[str, tuple[SimulatedPolicy, ChangeCosts]] = {
        "boost": ("boost", costs),
        "no_boost": ("shrink", costs),
        "drop": ("drop", costs),
        "torchft": ("torchft", PEER_COSTS["torchft"]),
        "torchft_tuned": ("torchft", PEER_COSTS["torchft_tuned"]),
        "restart": ("restart", PEER_COSTS["restart"]),
        "changes_free": ("boost", free),
    }
    traces = [
        fault_trace(wanted, seconds=SECONDS, every_s=EVERY_S, repair_s=REPAIR_S, seed=seed)
        for seed in SEEDS
    ]
    figures: dict[str, Any] = {}
    for name, (policy, paid) in plan.items():
        runs = [
            simulate(wanted, trace, policy, paid, seconds=SECONDS, calibration=calibration)
            for trace in traces
        ]
        figures[name] = round(statistics.fmean(run.goodput for run in runs), 4)
        if name in ("boost", "changes_free"):
            redone_s = statistics.fmean(run.buckets["recomputing"] for run in runs)
            figures[f"{name}_recomputing"] = round(redone_s / SECONDS, 4)
    # The same shapes with changes that cost nothing. The step at hand is lost with the GPU that
    # dies in it, whatever the runtime does: its size is the trace's, and given beside.
    allowed = figures["changes_free"]
    figures["allowed_by_shape"] = allowed
    figures["below_allowed"] = round(1.0 - figures["boost"] / allowed, 4)
    kept = allowed / (1.0 - figures["changes_free_recomputing"])
    figures["allowed_if_steps_at_hand_were_kept"] = round(kept, 4)
    figures["below_if_steps_at_hand_were_kept"] = round(1.0 - figures["boost"] / kept, 4)
    best = max(figures[name] for name in ("drop", "torchft", "torchft_tuned", "restart"))
    figures["best_other_over_ours"] = round(best / figures["boost"], 4)
    figures["failures"] = sum(len(trace) for trace in traces)
    return figures


def real(wanted: Config) -> Checked:
    """Two kills and a repair in a run of worker processes."""
    with tempfile.TemporaryDirectory(prefix="counterpoise-goodput-") as folder:
        with LocalRun(wanted, home=Path(folder)) as run:
            drill = Drill(run)
            drill.more_steps(4, START_DEADLINE_S)
            healthy = drill.commits[1:]
            began = drill.commits[-1].at
            acts = sorted(
                [(kill, gpu, True) for gpu, kill, _ in CHECK]
                + [(repair, gpu, False) for gpu, _, repair in CHECK if repair is not None]
            )
            times: dict[str, list[float]] = {gpu: [] for gpu, _, _ in CHECK}
            for at, gpu, kills in acts:
                time.sleep(max(0.0, began + at - time.time()))
                mark = drill.kill(gpu) if kills else drill.repair(gpu)
                times[gpu].append(mark.at - began)
            time.sleep(max(0.0, began + CHECK_S - time.time()))
        return _checked(wanted, drill, healthy, began, times)


def _checked(
    wanted: Config,
    drill: Drill,
    healthy: Sequence[StepCommitted],
    began: float,
    times: dict[str, list[float]],
) -> Checked:
    commits = [c for c in drill.commits if began < c.at <= began + CHECK_S]
    ideal_s = statistics.median(c.step_s for c in healthy)
    tokens = wanted.train.global_batch * wanted.train.seq_len
    seconds = commits[-1].at - began
    outages = tuple(
        Outage(each[0], each[1] if len(each) > 1 else CHECK_S * 2, *_place(gpu))
        for gpu, each in times.items()
    )
    formed = [g for g in drill.generations if g.at > began]
    forced = [_resumed_s(formed, drill.commits, began + each[0]) for each in times.values()]
    planned = [g.reconfigure_s for g in formed if g.proposal]
    return Checked(
        goodput=sum(c.tokens for c in commits) / tokens * ideal_s / seconds,
        seconds=seconds,
        outages=outages,
        costs=ChangeCosts(
            forced_s=round(statistics.median(forced), 3),
            planned_s=round(statistics.median(planned), 3) if planned else 0.2,
        ),
        overhead_s=max(0.0, statistics.median(c.step_s - max(c.replica_step_s) for c in healthy)),
    )


def _resumed_s(
    formed: Sequence[GenerationFormed], commits: Sequence[StepCommitted], killed: float
) -> float:
    """Seconds from a kill until the next step ran, without that step itself."""
    at = min(g.at for g in formed if g.at > killed)
    step = min(commits, key=lambda commit: abs(commit.at - at))
    return max(0.0, at - killed - step.step_s)


def _place(gpu: str) -> tuple[int, int]:
    rack, _, slot = gpu.partition("/")
    return int(rack.rpartition("-")[2]), int(slot)


def targets(_: Figures) -> list[Target]:
    return [
        Target(figure="best_other_over_ours", at_most=1.0, why="ahead of all others"),
        Target(
            figure="below_allowed",
            at_most=0.01,
            why="within 1 % of what the shape allows, step by step",
        ),
        Target(figure="check_error", at_most=0.05, why="the simulator against the real run"),
    ]


BENCHMARK = Benchmark(
    name="goodput",
    summary="fraction of the ideal by policy, 10 minutes of kills and repairs (simulated)",
    measure=measure,
    targets=targets,
)
