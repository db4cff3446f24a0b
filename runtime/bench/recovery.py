"""Recovery: seconds from a SIGKILL, and from an approval, to the next committed step.

16 workers twice, with a healthy step of 1 s: as four racks of 4, where the survivors of a loss
carry the whole batch in 1.5 s, and as the demo's two racks of 8, where one replica alone needs 2 s
for it, so that no recovery could commit sooner. Kills and approvals fall at different moments of a
step, since what is left of it counts. Each repeat ends with the GPU repaired.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bench.benchmark import Benchmark, Figures, Say, Target
from runtime.bench.drill import START_DEADLINE_S, Drill, lost_steps
from runtime.config import ClusterConfig, Config, RackConfig
from runtime.control.local import LocalRun
from storage.records import StepCommitted

# No repeat begins later than this, so that a slow machine still finishes within a minute.
LAST_BEGIN_S = 20.0
FOUR_RACKS = ClusterConfig(racks=tuple(RackConfig(name=f"rack-{i}", gpus=4) for i in range(4)))


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One repeat: the GPU that is lost, and which part of a step (0 to 1) has passed when it is
    killed and when the shrink is approved."""

    gpu: str
    kill_at: float
    approve_at: float


LOSSES = (
    Loss(gpu="rack-0/1", kill_at=0.5, approve_at=0.5),
    Loss(gpu="rack-1/3", kill_at=0.9, approve_at=0.1),
    Loss(gpu="rack-0/2", kill_at=0.1, approve_at=0.9),
)
DEMO_LOSSES = (Loss(gpu="rack-1/6", kill_at=0.5, approve_at=0.1),)


def measure(say: Say) -> dict[str, Any]:
    say("four racks of 4")
    figures = measure_losses(Config(cluster=FOUR_RACKS), LOSSES, say)
    say("two racks of 8")
    demo = measure_losses(Config(), DEMO_LOSSES, say)
    for key in ("step_s", "survivor_step_s", "kill_to_commit_s", "approve_to_commit_s"):
        figures[f"two_racks_{key}"] = demo[key]
    for key in ("processes_replaced", "steps_lost"):
        figures[key] += demo[key]
    return figures


def measure_losses(config: Config, losses: Sequence[Loss], say: Say) -> dict[str, Any]:
    """Run `config` through `losses`, one after the other, each repaired before the next."""
    began = time.monotonic()
    raw: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="counterpoise-recovery-") as folder:
        with LocalRun(config, home=Path(folder)) as run:
            drill = Drill(run)
            drill.more_steps(1, START_DEADLINE_S)
            say(f"first step committed after {time.monotonic() - began:.1f} s")
            for loss in losses:
                if raw and time.monotonic() - began > LAST_BEGIN_S:
                    say(f"only {len(raw)} repeats: this machine is slow now")
                    break
                raw.append(_repeat(drill, loss))
                say("  ".join(f"{key} {value:g}" for key, value in raw[-1].items()))
        commits = drill.commits
    return {
        "step_s": _median(raw, "step_s"),
        "kill_to_commit_s": _median(raw, "kill_to_commit_s"),
        "approve_to_commit_s": _median(raw, "approve_to_commit_s"),
        "processes_replaced": int(sum(each["processes_replaced"] for each in raw)),
        "steps_lost": lost_steps(commits),
        "survivor_step_s": _median(raw, "survivor_step_s"),
        "rejoined_step_s": _median(raw, "rejoined_step_s"),
        "grow_to_commit_s": _median(raw, "grow_to_commit_s"),
        "repeats": len(raw),
        "steps": len(commits),
        "raw": raw,
    }


def _repeat(drill: Drill, loss: Loss) -> dict[str, float]:
    """Lose a GPU, approve the shrink, repair it, approve the grow."""
    healthy = drill.more_steps(2)
    before = drill.pids()
    _pass(healthy, loss.kill_at)
    killed = drill.kill(loss.gpu)
    resumed = drill.next_generation(killed)
    proposal = drill.proposal(killed)
    survivors = drill.more_steps(1)
    _pass(survivors, loss.approve_at)
    approved = drill.approve(proposal)
    rejoined = drill.next_generation(approved)
    steady = drill.more_steps(1)
    after = drill.pids()
    grown = drill.approve(drill.proposal(drill.repair(loss.gpu)))
    whole = drill.next_generation(grown)
    seconds = {
        "step_s": healthy.step_s,
        "kill_to_commit_s": resumed.at - killed.at,
        "approve_to_commit_s": rejoined.at - approved.at,
        "grow_to_commit_s": whole.at - grown.at,
        "survivor_step_s": survivors.step_s,
        "rejoined_step_s": steady.step_s,
    }
    replaced = sum(after.get(each) != pid for each, pid in before.items() if each != loss.gpu)
    return {key: round(value, 3) for key, value in seconds.items()} | {
        "processes_replaced": replaced
    }


def _pass(since: StepCommitted, part: float) -> None:
    """Wait until `part` of the step after `since` has passed."""
    time.sleep(max(0.0, since.at + part * since.step_s - time.time()))


def _median(raw: list[dict[str, float]], key: str) -> float:
    return round(statistics.median(each[key] for each in raw), 3)


def targets(figures: Figures) -> list[Target]:
    return [
        Target(
            figure="kill_to_commit_s",
            at_most=1.0 + figures["step_s"],
            why="1 s + one healthy step, though the survivors carry the whole batch",
        ),
        Target(
            figure="approve_to_commit_s",
            at_most=2.0 + figures["step_s"],
            why="2 s + one healthy step",
        ),
        *_demo_targets(figures),
        Target(figure="processes_replaced", at_most=0, why="survivors live on"),
        Target(figure="steps_lost", at_most=0, why="no step is skipped or repeated"),
    ]


def _demo_targets(figures: Figures) -> list[Target]:
    if "two_racks_step_s" not in figures:
        return []
    return [
        Target(
            figure="two_racks_kill_to_commit_s",
            at_most=1.0 + figures["two_racks_survivor_step_s"],
            why="1 s + one step of the survivor with the whole batch",
        ),
        Target(
            figure="two_racks_approve_to_commit_s",
            at_most=2.0 + figures["two_racks_step_s"],
            why="2 s + one healthy step",
        ),
    ]


BENCHMARK = Benchmark(
    name="recovery",
    summary="SIGKILL and approval to the next committed step, 16 workers",
    measure=measure,
    targets=targets,
)
