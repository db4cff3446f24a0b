"""Units: how even the work of a reduced replica is with whole units, and with shared ones.

Arithmetic over layouts, no process: the busiest slot's share of the query heads over the even
share, for 64 heads over 7 of 8 slots and 128 heads over 30 of 32 (the NTP paper's setting); and
what such layouts need at full scale (`runtime.bench.scale`).
"""

from __future__ import annotations

import time
from typing import Any

from runtime.bench.benchmark import Benchmark, Figures, Say, Target
from runtime.bench.scale import measure_scale
from runtime.config import ModelConfig, TrainConfig
from runtime.layout.fractional import layout_for, max_over_even
from runtime.layout.takeover import home_holders, takeover
from runtime.layout.units import held_by_slot, num_units, rota
from runtime.layout.work import work_by_slot
from runtime.plan.generation import Holders

# (query heads, key/value heads, slots, live slots, hidden columns, blocks of 128 MLP columns,
# layers): a 70B Llama over a rack of 8, and the paper's 480B model (FFN 4x) over a rack of 32.
CASES = {
    "64/7": (64, 8, 8, 7, 8192, 224, 80),
    "128/30": (128, 8, 32, 30, 20480, 640, 100),
}
SEQ_LEN = {"64/7": 8192, "128/30": 16384}
# Samples that a replica works on at a time; the paper's local batch is 8.
SAMPLES = (8, 16)
HEADLINE = 16


def measure(say: Say) -> dict[str, Any]:
    figures: dict[str, Any] = {"max_over_even_whole": {}, "max_over_even_fractional": {}}
    for case, (heads, kv_heads, slots, live, hidden, blocks, layers) in CASES.items():
        model = ModelConfig(
            num_layers=layers,
            hidden=hidden,
            num_query_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=128,
            mlp_hidden=blocks * 128,
            mlp_block=128,
            vocab=128_000,
            vocab_block=64,
        )
        home = home_holders(model, slots)
        whole = takeover(model, home, home, range(live))
        figures["max_over_even_whole"][case] = max_over_even(model, whole, "attention", HEADLINE)
        for samples in SAMPLES:
            train = TrainConfig(
                global_batch=samples * 4, micro_batch=samples, fractional="auto",
                seq_len=SEQ_LEN[case],
            )  # fmt: skip
            began = time.perf_counter()
            shared = layout_for(model, train, 4, home, home, range(live))
            took_s = time.perf_counter() - began
            ratio = max_over_even(model, shared, "attention", samples)
            if samples == HEADLINE:
                figures["max_over_even_fractional"][case] = ratio
            figures[f"{_flat('heads', case)}_by_{samples}"] = {
                "max_over_even": ratio,
                "turns": {family: len(rota(shared, family)) for family in ("attention", "mlp")},
                "work_over_even_whole": _work_over_even(model, train.seq_len, whole, slots),
                "most_heads_held": _most_held(model, shared, live),
                "layout_s": round(took_s, 4),
            }
            figures[_flat(f"work_by_{samples}", case)] = _work_over_even(
                model, train.seq_len, shared, slots
            )
            say(f"{case}, {samples} samples: {ratio:.4f} of the even share")
    for case in CASES:
        for kind in ("whole", "fractional"):
            figures[_flat(kind, case)] = figures[f"max_over_even_{kind}"][case]
    return figures | measure_scale(say)


def _flat(kind: str, case: str) -> str:
    """Name of a figure of its own for a case, as tables have no place for nested ones."""
    return f"{kind}_{case.replace('/', '_over_')}"


def _work_over_even(model: ModelConfig, seq_len: int, holders: Holders, slots: int) -> float:
    """FLOPs of the busiest slot over the even share, all families together."""
    work = [share for share in work_by_slot(model, seq_len, holders, slots) if share]
    return max(work) * len(work) / sum(work)


def _most_held(model: ModelConfig, holders: Holders, live: int) -> str:
    """Heads in the fullest slot's memory, and the even share."""
    held = held_by_slot(model, holders, range(live))
    most = max(len(units["attention"]) for units in held.values())
    return f"{most} for {num_units(model, 'attention') / live:.2f}"


def targets(_: Figures) -> list[Target]:
    work = [f"work_by_{samples}" for samples in SAMPLES]
    return [
        Target(figure=_flat(kind, case), at_most=1.02, why=f"{why} within 2 % of even")
        for kind, why in [("fractional", "heads"), *((each, "all work") for each in work)]
        for case in CASES
    ] + [
        Target(figure="groups_whole", at_most=909, why="128 replicas of 72 slots, 16 reduced"),
        Target(figure="groups_a_rank_whole", at_most=58, why="the same"),
    ]


BENCHMARK = Benchmark(
    name="units",
    summary="query heads of the busiest slot over the even share, whole and shared by sample",
    measure=measure,
    targets=targets,
)
