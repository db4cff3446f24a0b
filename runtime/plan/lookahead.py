"""How many more failures of a rack's GPUs a boost can make up for, by the model. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from runtime.config import Config, ModelConfig, RackConfig, TrainConfig
from runtime.layout.fractional import layout_for
from runtime.layout.takeover import home_holders
from runtime.layout.work import work_by_slot
from runtime.power.emulated import sustained_w
from runtime.power.governor import RackPower
from runtime.power.headroom import boostable_failures
from runtime.power.port import PowerLimits


def failures_to_spare(
    config: Config, rack: RackConfig, live: tuple[int, ...], dead_slot_w: float = 0.0
) -> int:
    """Failures in a row, the highest live slots first, that leave `rack` at the healthy pace.

    Args:
        config, rack: with the budgets and limits that stand now.
    """
    emulated = config.emulated
    limits = PowerLimits(
        min_w=emulated.min_cap_w, normal_w=emulated.normal_cap_w, max_w=sustained_w(emulated)
    )
    layouts = _Layouts(config.model, config.train, len(config.cluster.racks), rack.gpus)
    return _count(layouts, live, limits, rack.power_budget_w, dead_slot_w, config.power.curve)


@dataclass(frozen=True, slots=True)
class _Layouts:
    """What decides who holds what in a rack of `num_slots`."""

    model: ModelConfig
    train: TrainConfig
    num_replicas: int
    num_slots: int

    def work(self, live: tuple[int, ...]) -> tuple[float, ...]:
        """Work of every slot once the replica trains on `live`."""
        home = home_holders(self.model, self.num_slots)
        holders = layout_for(self.model, self.train, self.num_replicas, home, home, live)
        return work_by_slot(self.model, self.train.seq_len, holders, self.num_slots)


@lru_cache(maxsize=256)
def _count(
    layouts: _Layouts,
    live: tuple[int, ...],
    limits: PowerLimits,
    budget_w: float,
    dead_slot_w: float,
    curve: tuple[tuple[float, float], ...],
) -> int:
    def lose(more: int) -> RackPower | None:
        left = live[: len(live) - more]
        if not left:
            return None
        work = layouts.work(left)
        alive = frozenset(left)
        return RackPower(
            loads=tuple(work[slot] if slot in alive else 0.0 for slot in range(layouts.num_slots)),
            live=left,
            limits=limits,
            budget_w=budget_w,
            dead_slot_w=dead_slot_w,
            curve=curve,
        )

    return boostable_failures(lose, len(live))
