"""Prometheus' text format, version 0.0.4: the families we have and how they are written. Pure."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "counterpoise_"


class Family(NamedTuple):
    """kind: a counter only ever grows within a run."""

    kind: Literal["gauge", "counter"]
    help: str


FAMILIES: dict[str, Family] = {
    "live_store_up": Family("gauge", "1 while the live store answers."),
    "run_info": Family("gauge", "1 for every run that is on or ended a moment ago."),
    "run_active": Family("gauge", "1 while the run has not ended."),
    "generation": Family("gauge", "The run's generation."),
    "steps_total": Family("counter", "Optimizer steps committed."),
    "loss": Family("gauge", "Training loss of the last step."),
    "step_seconds": Family("gauge", "Time of the last steps."),
    "healthy_step_seconds": Family("gauge", "Step time of the fully healthy run, 0 not known."),
    "tokens_per_second": Family("gauge", "Committed tokens per second."),
    "goodput_ratio": Family("gauge", "Goodput over the run by kind: time, token."),
    "data_age_seconds": Family("gauge", "Age of the run's newest snapshot."),
    "wall_seconds_total": Family("counter", "Wall time of the run."),
    "ledger_seconds_total": Family("counter", "Wall time by bucket of the goodput ledger."),
    "replica_degree": Family("gauge", "Live slots of a replica."),
    "replica_slots": Family("gauge", "Slots of a replica, live and dead."),
    "replica_training": Family("gauge", "1 while the replica trains, 0 while it is left out."),
    "replica_samples": Family("gauge", "Samples of a step that the replica takes."),
    "replica_step_seconds": Family("gauge", "The replica's own share of a step."),
    "replica_boost_watts": Family("gauge", "Watts above normal of its most boosted GPU."),
    "gpus": Family("gauge", "GPUs by rack and state."),
    "rack_power_watts": Family("gauge", "What a rack's GPUs draw."),
    "rack_cap_watts": Family("gauge", "Sum of the caps of a rack's GPUs."),
    "rack_budget_watts": Family("gauge", "Power budget of a rack."),
    "rack_temperature_celsius": Family("gauge", "Hottest GPU of a rack."),
    "rack_data_age_seconds": Family("gauge", "Age of a rack's newest record."),
    "gpu_power_watts": Family("gauge", "What a GPU draws."),
    "gpu_cap_watts": Family("gauge", "Power cap of a GPU, 0 for one that draws nothing."),
    "gpu_temperature_celsius": Family("gauge", "Temperature of a GPU."),
    "gpu_utilisation_ratio": Family("gauge", "Utilisation of a GPU."),
    "gpu_clock_megahertz": Family("gauge", "Clock of a GPU."),
    "proposals": Family("gauge", "Proposals by state, of the newest ones."),
    "proposal_expires_seconds": Family("gauge", "Until the next open proposal expires."),
    "journal_unrecorded": Family("gauge", "Journal entries that the history does not have yet."),
    "notices_total": Family("counter", "Notices by channel and outcome."),
    "notices_waiting": Family("gauge", "Notices not delivered yet."),
    "channel_failing": Family("gauge", "1 while a channel cannot be reached."),
}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Exposition:
    """Collects samples; `text` writes them family by family."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {name: [] for name in FAMILIES}

    def add(self, family: str, value: float, labels: str = "") -> None:
        """labels: from `labels_of`."""
        self._lines[family].append(f"{PREFIX}{family}{labels} {_number(value)}\n")

    def text(self) -> str:
        parts = []
        for name, lines in self._lines.items():
            if lines:
                family = FAMILIES[name]
                parts.append(f"# HELP {PREFIX}{name} {family.help}\n")
                parts.append(f"# TYPE {PREFIX}{name} {family.kind}\n")
                parts += lines
        return "".join(parts)


def labels_of(**labels: object) -> str:
    """`{run="a",rack="b"}`."""
    inside = ",".join(
        f'{name}="{str(value).translate(_ESCAPES)}"' for name, value in labels.items()
    )
    return f"{{{inside}}}" if inside else ""


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
