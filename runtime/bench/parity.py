"""Parity: a run that loses and regains GPUs trains what one undisturbed process trains.

The same initial weights and samples, 60 steps: in one process by `runtime.engine.reference`, and by
real worker processes through a kill, the drop, a shrink, a grow, and a kill and shrink in the other
replica.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.bench.benchmark import Benchmark, Figures, Say, Target
from runtime.bench.drill import START_DEADLINE_S, Drill
from runtime.config import (
    ClusterConfig,
    Config,
    EmulatedConfig,
    ModelConfig,
    RackConfig,
    TrainConfig,
)
from runtime.control.local import LocalRun
from runtime.engine.checkpoint import newest_checkpoint, read_full
from runtime.engine.reference import Reference
from runtime.errors import CounterpoiseError
from storage.records import StepCommitted

STEPS = 60
BETWEEN = 4
SLOTS = 4


def config() -> Config:
    """2 replicas of 4 slots; 8 query heads on 2 KV heads, fewer than slots; MLP blocks a prime."""
    return Config(
        name="parity",
        model=ModelConfig(
            num_layers=2,
            hidden=64,
            num_query_heads=8,
            num_kv_heads=2,
            head_dim=8,
            mlp_hidden=136,
            mlp_block=8,
        ),
        train=TrainConfig(
            seq_len=32, global_batch=8, micro_batch=4, steps=STEPS, state_hash_every=10
        ),
        cluster=ClusterConfig(
            racks=(RackConfig(name="rack-0", gpus=SLOTS), RackConfig(name="rack-1", gpus=SLOTS))
        ),
        emulated=EmulatedConfig(step_s=0.1),
    )


def measure(say: Say) -> dict[str, Any]:
    wanted = config()
    with tempfile.TemporaryDirectory(prefix="counterpoise-parity-") as folder:
        began = time.monotonic()
        with LocalRun(wanted, home=Path(folder)) as run:
            drill = Drill(run)
            _disturb(drill, say)
            finish = run.join(deadline_s=40.0)
        if finish.status != "stopped":
            raise CounterpoiseError(f"the run {finish.status}: {finish.reason}")
        run_s = time.monotonic() - began
        newest = newest_checkpoint([*Path(folder).glob("checkpoint/step-*")])
        if newest is None:
            raise CounterpoiseError("the run left no checkpoint")
        applied, params = read_full(newest, wanted.model)
    say(f"{applied} steps in {run_s:.1f} s; now the same steps in one process")
    reference, losses = _undisturbed(wanted)
    whole = {f"{name}.{layer}": tensor for (name, layer), tensor in reference.params.items()}
    missing, repeated = count_samples(drill.commits, STEPS * wanted.train.global_batch)
    return {
        "max_loss_rel_diff": max_loss_rel_diff(losses, drill.commits),
        "max_param_abs_diff": max_param_abs_diff(whole, params),
        "samples_missing": missing,
        "samples_repeated": repeated,
        "steps": len({commit.step for commit in drill.commits}),
        "generations": len(drill.generations),
        "final_loss": losses[-1],
        "run_s": round(run_s, 2),
        "causes": [entry.cause for entry in drill.generations],
    }


def _undisturbed(wanted: Config) -> tuple[Reference, list[float]]:
    """The same steps in this process, and their losses.

    One thread: on matrices this small more of them only wait for each other (13 times slower on a
    loaded machine with two cores).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reference = Reference(wanted)
        return reference, [reference.step()[0] for _ in range(STEPS)]
    finally:
        torch.set_num_threads(threads)


def _disturb(drill: Drill, say: Say) -> None:
    """Two kills, one in each replica; every proposal is approved; the first GPU is repaired."""
    drill.more_steps(BETWEEN, START_DEADLINE_S)
    _lose("rack-0/1", drill, say)
    drill.more_steps(BETWEEN)
    say("repair rack-0/1, approve the grow")
    repaired = drill.repair("rack-0/1")
    drill.next_generation(drill.approve(drill.proposal(repaired)))
    drill.more_steps(BETWEEN)
    _lose("rack-1/2", drill, say)


def _lose(gpu: str, drill: Drill, say: Say) -> None:
    say(f"step {drill.commits[-1].step}: SIGKILL to {gpu}; its replica is left out")
    killed = drill.kill(gpu)
    drill.next_generation(killed)
    proposal = drill.proposal(killed)
    drill.more_steps(BETWEEN)
    say(f"approve: {proposal.options[proposal.recommended].title}")
    drill.next_generation(drill.approve(proposal))


# ── comparison ────────────────────────────────────────────────────────────────────────────────


def count_samples(commits: Sequence[StepCommitted], num_samples: int) -> tuple[int, int]:
    """Of the indices `[0, num_samples)`: how many no step consumed, and how many times one was
    consumed again (or does not belong to the run at all)."""
    taken = Counter(
        index
        for commit in commits
        for _, first, count in commit.samples
        for index in range(first, first + count)
    )
    missing = sum(index not in taken for index in range(num_samples))
    return missing, taken.total() - (num_samples - missing)


def max_loss_rel_diff(losses: Sequence[float], commits: Sequence[StepCommitted]) -> float:
    """Largest relative difference of the loss at any step; infinite when a step is missing."""
    ours = {commit.step: commit.loss for commit in commits}
    return max(
        abs(ours.get(step, float("inf")) - loss) / abs(loss) for step, loss in enumerate(losses)
    )


def max_param_abs_diff(reference: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> float:
    """Largest absolute difference of any parameter.

    Raises:
        CounterpoiseError: the two do not have the same parameters.
    """
    if reference.keys() != params.keys():
        raise CounterpoiseError(f"parameters differ: {reference.keys() ^ params.keys()}")
    return max(
        float(torch.max(torch.abs(tensor.detach() - params[key].reshape(tensor.shape))))
        for key, tensor in reference.items()
    )


def targets(_: Figures) -> list[Target]:
    return [
        Target(figure="max_loss_rel_diff", at_most=1e-4, why="at every step"),
        Target(figure="max_param_abs_diff", at_most=1e-3, why="after the last step"),
        Target(figure="samples_missing", at_most=0, why="every sample is consumed"),
        Target(figure="samples_repeated", at_most=0, why="exactly once"),
    ]


BENCHMARK = Benchmark(
    name="parity",
    summary="60 steps through kills, drop, shrink and grow against 60 steps in one process",
    measure=measure,
    targets=targets,
)
