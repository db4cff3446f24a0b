"""The NTP paper's availability figures for 32,768 GPUs, beside what the simulator gives.

Paper: arXiv 2504.06095, figures 3 to 8; where it shows none, the value is arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.bench.benchmark import Benchmark, Figures, Say, Target
from runtime.plan.simulate_cluster import (
    ClusterSetting,
    availability,
    drop_loss,
    failed_over_time,
    failed_per_domain,
    ntp_loss,
    spare_domains,
)
from runtime.power.curve import power_for

SAMPLES = 400
FRACTION = 0.004
DAYS = 15.0

# figure -> what the paper says (or arithmetic, where it shows none).
PAPER = {
    "availability_tp64": 0.94,
    "share_above_0.1pct_5_day_repair": 0.81,
    "share_above_0.1pct_3_day_repair": 0.635,
    "drop_loss_0.1pct": 0.036,
    "drop_loss_0.2pct": 0.066,
    "drop_loss_0.4pct": 0.12,
    "drop_loss_unpacked_0.1pct": 0.228,
    "drop_loss_unpacked_0.2pct": 0.403,
    "drop_loss_unpacked_0.4pct": 0.64,
    "ntp_loss_0.4pct": 0.03,
    "ntp_boost_loss_0.4pct": 0.01,
    "domains_touched_0.4pct": 0.12,
    "spares_drop": 90,
    "spares_ntp": 16,
    "spares_boost": 0,
    "boost_tp30": 1.10,
    "boost_tp28": 1.26,
}


def measure(say: Say) -> dict[str, Any]:
    """Sample everything; a figure that the paper has is followed by the paper's value."""
    setting = ClusterSetting()
    say(f"{setting.num_gpus} GPUs in domains of {setting.domain}, {SAMPLES} samples a point")
    ours = _losses(setting) | _over_time(setting)
    ours["availability_tp64"] = availability(setting.num_gpus, 64, 0.001, SAMPLES, seed=1)
    for degree in setting.fallbacks:
        ours[f"boost_tp{degree}"] = power_for(setting.domain / degree)
    whole = ClusterSetting(whole_heads=True)
    failed = failed_per_domain(whole, FRACTION, SAMPLES, seed=2)
    ours |= {
        "ntp_loss_0.4pct_whole_heads": ntp_loss(whole, failed, boost=False),
        "ntp_boost_loss_0.4pct_whole_heads": ntp_loss(whole, failed, boost=True),
        "step_tp30_whole_heads": whole.step_ratio(30),
        "step_tp28_whole_heads": whole.step_ratio(28),
    }
    kept, by_block = _order(setting)
    figures: dict[str, Any] = {}
    for key, value in ours.items():
        figures[key] = round(float(value), 4)
        if key in PAPER:
            figures[f"{key}_paper"] = PAPER[key]
    return {
        **figures,
        "order_violations": kept,
        "loss_by_gpus_at_once": by_block,
        "samples": SAMPLES,
        "worst_drop_difference": max(
            abs(figures[key] - PAPER[key]) for key in PAPER if key.startswith("drop_loss_0")
        ),
        "availability_difference": abs(figures["availability_tp64"] - 0.94),
        "spares_ntp_difference": abs(figures["spares_ntp"] - PAPER["spares_ntp"]),
    }


def _losses(setting: ClusterSetting) -> dict[str, float]:
    ours: dict[str, float] = {}
    for fraction, name in ((0.001, "0.1pct"), (0.002, "0.2pct"), (FRACTION, "0.4pct")):
        failed = failed_per_domain(setting, fraction, SAMPLES, seed=2)
        ours[f"drop_loss_{name}"] = drop_loss(setting, failed)
        ours[f"drop_loss_unpacked_{name}"] = drop_loss(setting, failed, packed=False)
        ours[f"ntp_loss_{name}"] = ntp_loss(setting, failed, boost=False)
        ours[f"ntp_boost_loss_{name}"] = ntp_loss(setting, failed, boost=True)
    ours["domains_touched_0.4pct"] = float((failed > 0).mean())
    return ours


def _over_time(setting: ClusterSetting) -> dict[str, float]:
    """From the trace: how often many are down, and the spares that its typical peak needs."""
    ours: dict[str, float] = {}
    for repair_days in (5, 3):
        down = failed_over_time(setting.num_gpus, DAYS, repair_days, SAMPLES, seed=3)
        share = float((down > 0.001 * setting.num_gpus).mean())
        ours[f"share_above_0.1pct_{repair_days}_day_repair"] = share
        if repair_days == 5:
            peak = float(np.quantile(down.max(1), 0.99)) / setting.num_gpus
    failed = failed_per_domain(setting, peak, SAMPLES, seed=4)
    for how in ("drop", "ntp", "boost"):
        ours[f"spares_{how}"] = float(np.median(spare_domains(setting, failed, how)))
    ours["peak_failed"] = peak
    return ours


def _order(setting: ClusterSetting) -> tuple[int, dict[str, list[float]]]:
    """Drop loses more than NTP, NTP more than NTP with boost, whatever one failure takes."""
    violations, by_block = 0, {}
    for at_once in (1, 2, 4, 8, 16):
        failed = failed_per_domain(setting, FRACTION, SAMPLES, seed=5, at_once=at_once)
        losses = [
            drop_loss(setting, failed),
            ntp_loss(setting, failed, boost=False),
            ntp_loss(setting, failed, boost=True),
        ]
        by_block[str(at_once)] = [round(loss, 4) for loss in losses]
        violations += losses != sorted(losses, reverse=True)
    return violations, by_block


def targets(_: Figures) -> list[Target]:
    return [
        Target(figure="worst_drop_difference", at_most=0.01, why="paper 12 % at 0.4 % failed"),
        Target(figure="availability_difference", at_most=0.01, why="paper 94 % at TP64"),
        Target(figure="ntp_loss_0.4pct", at_most=0.03, why="paper <= 3 %"),
        Target(figure="ntp_boost_loss_0.4pct", at_most=0.01, why="paper < 1 %"),
        Target(figure="spares_ntp_difference", at_most=0, why="paper 16"),
        Target(figure="order_violations", at_most=0, why="drop > NTP > NTP with boost"),
    ]


BENCHMARK = Benchmark(
    name="cluster",
    summary="the NTP paper's availability figures at 32,768 GPUs (simulated)",
    measure=measure,
    targets=targets,
)
