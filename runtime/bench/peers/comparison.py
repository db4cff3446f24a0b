"""`bench peers`: ours beside what people would use instead, on the same work, in one run.

Steady state: the bare loop and DTensor with DDP take turns with ours in the same processes.
Recovery: ours, torchft and a torchrun restart each lose one rank of 2 replicas. A peer that does
not run here is null, with the reason in `not_measured`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from runtime.bench.benchmark import Benchmark, Figures, Say, Target
from runtime.bench.drill import START_DEADLINE_S
from runtime.bench.peers.outside import END_DEADLINE_S, started, wait_until
from runtime.bench.peers.recovery import Recovered, fenced, or_reason, ours, restart, torchft
from runtime.bench.peers.steady_job import SteadyJob, SteadyResult
from runtime.config import (
    ClusterConfig,
    Config,
    EmulatedConfig,
    ModelConfig,
    PolicyConfig,
    RackConfig,
)
from runtime.control.supervisor import free_port

# Rounds of single steps: many pairs, each under the same load.
STEADY_S = {4: 9.0, 2: 5.0}
STEPS_A_ROUND = 1
TUNED_MS = 1000


def config(degree: int) -> Config:
    """2 replicas of `degree` slots, as fast as the host; untied, which the DTensor peer needs."""
    racks = tuple(RackConfig(name=f"rack-{index}", gpus=degree) for index in range(2))
    return Config(
        name="peers",
        model=ModelConfig(tied=False),
        cluster=ClusterConfig(racks=racks),
        emulated=EmulatedConfig(step_s=0.0),
        policy=PolicyConfig(shrink="auto", grow="auto"),
    )


def measure(say: Say) -> dict[str, Any]:
    return _steady_figures(say) | _recovery_figures(2, say)


def measure_full(say: Say) -> dict[str, Any]:
    """With 2 replicas of 4 slots, and torchft with a rank that stands still, too."""
    figures = measure(say)
    wider = _recovery_figures(4, say)
    figures |= {f"tp4_{key}": value for key, value in wider.items()}
    say("torchft, SIGSTOP to one rank (its own time limit is 60 s)")
    stopped = or_reason(lambda: torchft(config(2), 2, 2, fault="stop", deadline_s=90.0))
    _put(figures, "torchft_stopped_s", stopped, "recovery_s")
    return figures


# steady state ----------------------------------------------------------------------------------


def _steady_figures(say: Say) -> dict[str, Any]:
    four, two = steady(2, 2, STEADY_S[4], say), steady(1, 2, STEADY_S[2], say)
    figures: dict[str, Any] = {
        "step_ratio_dtensor": _ratio(four, "dtensor"),
        "step_ratio_bare": _ratio(four, "bare"),
        "step_ratio_dtensor_2_ranks": _ratio(two, "dtensor"),
        "step_ratio_bare_2_ranks": _ratio(two, "bare"),
    }
    for name in ("ours", "bare", "dtensor"):
        figures[f"step_s_{name}"] = round(statistics.median(four.step_s[name]), 4)
        figures[f"step_s_{name}_2_ranks"] = round(statistics.median(two.step_s[name]), 4)
    figures["loss_rel_diff"] = max(_loss_difference(four), _loss_difference(two))
    figures["rounds"] = [len(four.step_s["ours"]), len(two.step_s["ours"])]
    return figures


def steady(num_replicas: int, degree: int, seconds: float, say: Say) -> SteadyResult:
    """Let the three programs take turns for `seconds`.

    Raises:
        CounterpoiseError: a rank failed, with the end of its output.
    """
    say(f"steady state: {num_replicas} replicas of {degree} slots")
    with tempfile.TemporaryDirectory(prefix="counterpoise-steady-") as name:
        folder = Path(name)
        result = folder / "result"
        racks = config(degree).cluster.racks[:num_replicas]
        job = SteadyJob(
            config=msgspec.structs.replace(config(degree), cluster=ClusterConfig(racks=racks)),
            num_replicas=num_replicas,
            degree=degree,
            port=free_port(),
            seconds=seconds,
            steps=STEPS_A_ROUND,
            result=str(result),
        )
        path = folder / "job.json"
        path.write_bytes(msgspec.json.encode(job))
        command = [sys.executable, "-m", "runtime.bench.peers.steady_worker", str(path)]
        with started(command, folder):
            deadline_s = seconds + START_DEADLINE_S + END_DEADLINE_S
            wait_until(result.exists, deadline_s, "result", folder)
            return msgspec.json.decode(result.read_bytes(), type=SteadyResult)


def _ratio(result: SteadyResult, peer: str) -> float:
    """Median over the rounds of ours over the peer's step time in the same round."""
    pairs = zip(result.step_s["ours"], result.step_s[peer], strict=True)
    return round(statistics.median(mine / theirs for mine, theirs in pairs), 3)


def _loss_difference(result: SteadyResult) -> float:
    """Largest relative difference of the first losses from ours: all train the same."""
    mine = result.first_losses["ours"]
    return max(
        abs(loss - own) / own
        for losses in result.first_losses.values()
        for own, loss in zip(mine, losses, strict=True)
    )


# recovery --------------------------------------------------------------------------------------


def _recovery_figures(degree: int, say: Say) -> dict[str, Any]:
    wanted = config(degree)
    figures: dict[str, Any] = {}
    say(f"SIGKILL to one of 2 x {degree} ranks: ours")
    first, all_train_s = ours(wanted)
    figures |= {"recovery_s": round(first.recovery_s, 3), "all_survivors_train_s": all_train_s}
    figures["all_survivors_train_s"] = round(all_train_s, 3)
    _put(figures, "degraded_throughput", first, "throughput")
    _more(figures, "", first)
    tuned = partial(torchft, wanted, 2, degree, TUNED_MS, settle=False)
    plan: list[tuple[str, str, Callable[[], Recovered]]] = [
        ("_torchft", "torchft", partial(torchft, wanted, 2, degree)),
        ("_torchft_tuned", "torchft tuned to 1 s", tuned),
        ("_restart", "torchrun restart", partial(restart, wanted, 2, degree)),
    ]
    for suffix, words, act in plan:
        say(f"the same: {words}")
        found = or_reason(act)
        _put(figures, f"recovery_s{suffix}", found, "recovery_s")
        if suffix == "_torchft":
            _put(figures, "degraded_throughput_torchft", found, "throughput")
        _more(figures, suffix, found)
    say("one rank alive but still: ours")
    for fault, seconds in fenced(wanted).items():
        figures[f"fence_{fault}_s"] = round(seconds, 3)
    return figures


def _put(figures: dict[str, Any], key: str, found: Recovered | str, field: str) -> None:
    if isinstance(found, str):
        figures[key] = None
        figures.setdefault("not_measured", {})[key] = found
    else:
        value = getattr(found, field)
        figures[key] = None if value is None else round(value, 3)


def _more(figures: dict[str, Any], suffix: str, found: Recovered | str) -> None:
    for field in ("steps_redone", "ranks_in_play"):
        figures[f"{field}{suffix}"] = None if isinstance(found, str) else getattr(found, field)


def targets(figures: Figures) -> list[Target]:
    found = [
        Target(figure="step_ratio_dtensor", at_most=0.68, why="4 ranks, DTensor with DDP"),
        Target(figure="step_ratio_dtensor_2_ranks", at_most=0.80, why="2 ranks"),
        Target(figure="step_ratio_bare", at_most=1.03, why="a bare loop without fault tolerance"),
        Target(figure="step_ratio_bare_2_ranks", at_most=1.03, why="the same on 2 ranks"),
        Target(figure="loss_rel_diff", at_most=1e-4, why="all train the same"),
        Target(figure="steps_redone", at_most=0, why="no step is redone"),
    ]
    for suffix, times in (("_torchft", 10.0), ("_torchft_tuned", 2.5), ("_restart", 10.0)):
        peer = figures.get(f"recovery_s{suffix}")
        if isinstance(peer, float):
            why = f"{peer:.2f} s{suffix.replace('_', ' ')}, over {times:g}"
            found.append(Target(figure="recovery_s", at_most=round(peer / times, 3), why=why))
    # The fence's least deadline; three steps are shorter here.
    for fault in ("stop", "hang"):
        why = "three times the step deadline of 2 s"
        found.append(Target(figure=f"fence_{fault}_s", at_most=6.0, why=why))
    return found


BENCHMARK = Benchmark(
    name="peers",
    summary="ours beside a bare loop, DTensor with DDP, torchft and a torchrun restart",
    measure=measure,
    targets=targets,
    measure_full=measure_full,
)
