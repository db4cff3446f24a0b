"""Sync: `direct` against `reshard` in a mixed shape, and the mixed shape against the uniform one.

Real ranks on the same processes take turns: some steps of each variant, many times over. All train
the same global batch, so a mixed step does the same work as a uniform one with a slot less.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from runtime.bench.benchmark import Benchmark, Figures, Say, Target
from runtime.bench.ranks import Lap, Ranks, Variant, running
from runtime.config import ClusterConfig, Config, ModelConfig, RackConfig, TrainConfig
from runtime.errors import CounterpoiseError
from runtime.layout.takeover import home_holders, takeover
from runtime.layout.traffic import intra_rack_bytes
from runtime.plan.batch import apportion
from runtime.plan.generation import GenerationPlan, ReplicaPlan

SLOTS = 4
ROUNDS = 12
STEPS = 3
WARM_UP_STEPS = 2
ALL = tuple(range(SLOTS))
MIXED = (ALL, (0, 1, 3))


def config(sync: Literal["direct", "reshard"]) -> Config:
    """2 replicas of 4 slots, 2.2M parameters: enough for several buckets a slot."""
    return Config(
        name="sync",
        model=ModelConfig(
            num_layers=4,
            hidden=192,
            num_query_heads=12,
            num_kv_heads=12,
            head_dim=16,
            mlp_hidden=512,
            mlp_block=8,
            vocab=256,
            vocab_block=8,
        ),
        train=TrainConfig(
            seq_len=32, global_batch=14, micro_batch=14, sync=sync, bucket_mb=0.3,
            state_hash_every=0,
        ),
        cluster=ClusterConfig(
            racks=tuple(RackConfig(name=f"rack-{n}", gpus=SLOTS) for n in range(len(MIXED)))
        ),
    )  # fmt: skip


def shape(wanted: Config, live: Sequence[Sequence[int]]) -> GenerationPlan:
    """All replicas training on their live slots, with samples in proportion to those."""
    home = home_holders(wanted.model, SLOTS)
    samples = apportion(wanted.train.global_batch, [len(slots) for slots in live])
    return GenerationPlan(
        run="sync",
        generation=1,
        store_host="",
        store_port=0,
        replicas=tuple(
            ReplicaPlan(
                replica=number,
                rack=f"rack-{number}",
                mode="training",
                gpus=tuple(f"rack-{number}/{slot}" for slot in range(SLOTS)),
                live=tuple(slots),
                holders=takeover(wanted.model, home, home, slots),
                num_samples=count,
            )
            for number, (slots, count) in enumerate(zip(live, samples, strict=True))
        ),
    )


def measure(say: Say) -> dict[str, Any]:
    direct, reshard = config("direct"), config("reshard")
    mixed = shape(direct, MIXED)
    variants = {
        "uniform": Variant(config=direct, plan=shape(direct, [ALL] * len(MIXED))),
        "direct": Variant(config=direct, plan=mixed),
        "reshard": Variant(config=reshard, plan=mixed),
    }
    say(f"{len(MIXED) * SLOTS} ranks, {ROUNDS} rounds of {STEPS} steps of {', '.join(variants)}")
    with running(variants) as ranks:
        laps = _rounds(ranks, list(variants))
    healthy = [gpu for gpu in mixed.members() if gpu.startswith("rack-0/")]
    handed_over = sum(laps["reshard"][0][gpu].handed_over_bytes for gpu in healthy)
    counted = {sync: intra_rack_bytes(direct.model, mixed, sync)[0] for sync in variants}
    if handed_over != counted["reshard"]:
        raise CounterpoiseError(f"reshard sent {handed_over} bytes, not {counted['reshard']}")
    step_s = {name: _step_s(rounds) for name, rounds in laps.items()}
    exposed = {name: _exposed_s(rounds) for name, rounds in laps.items()}
    return {
        "intra_rack_bytes_direct": counted["direct"],
        "intra_rack_bytes_reshard": handed_over,
        "exposed_s_direct": statistics.median(exposed["direct"]),
        "exposed_s_reshard": statistics.median(exposed["reshard"]),
        "exposed_direct_over_reshard": _ratio(exposed["direct"], exposed["reshard"]),
        "mixed_over_uniform": _ratio(step_s["direct"], step_s["uniform"]),
        "reshard_over_uniform": _ratio(step_s["reshard"], step_s["uniform"]),
        "exposed_s_uniform": statistics.median(exposed["uniform"]),
        "step_s_uniform": statistics.median(step_s["uniform"]),
        "step_s_direct": statistics.median(step_s["direct"]),
        "step_s_reshard": statistics.median(step_s["reshard"]),
        "rounds": ROUNDS,
        "raw_step_s": step_s,
        "raw_exposed_s": exposed,
    }


def _rounds(ranks: Ranks, names: Sequence[str]) -> Mapping[str, list[dict[str, Lap]]]:
    """Laps by variant; the order turns round from round to round, so that none is always first."""
    for name in names:
        ranks.lap(name, WARM_UP_STEPS)
    laps: dict[str, list[dict[str, Lap]]] = {name: [] for name in names}
    for number in range(ROUNDS):
        turned = [*names[number % len(names) :], *names[: number % len(names)]]
        for name in turned:
            laps[name].append(ranks.lap(name, STEPS))
    return laps


def _step_s(rounds: Sequence[Mapping[str, Lap]]) -> list[float]:
    """Seconds a step of every round; the commit keeps ranks in step, so the slowest is all."""
    return [
        statistics.median(max(times) for times in zip(*(lap.step_s for lap in laps), strict=True))
        for laps in (list(by_gpu.values()) for by_gpu in rounds)
    ]


def _exposed_s(rounds: Sequence[Mapping[str, Lap]]) -> list[float]:
    """Exposed sync time of every round: the mean over ranks, the median over its steps."""
    found = []
    for by_gpu in rounds:
        steps = zip(*(lap.steps for lap in by_gpu.values()), strict=True)
        found.append(
            statistics.median(
                statistics.fmean(step.exposed_sync_s for step in by_rank) for by_rank in steps
            )
        )
    return found


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of the rounds: what slows a whole round down cancels out."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def targets(_: Figures) -> list[Target]:
    return [
        Target(figure="intra_rack_bytes_direct", at_most=0, why="in the healthy replica, per step"),
        Target(figure="exposed_direct_over_reshard", at_most=1.0, why="below the paper's way"),
        Target(figure="mixed_over_uniform", at_most=1.01, why="step time at the same work"),
    ]


BENCHMARK = Benchmark(
    name="sync",
    summary="gradient sync of a mixed shape: direct against reshard, and against a uniform shape",
    measure=measure,
    targets=targets,
)
