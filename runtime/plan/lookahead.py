"""How many more failures of a rack's GPUs a boost can make up for, by the model. Pure."""

from __future__ import annotations

from functools import lru_cache

from runtime.config import Config, ModelConfig, RackConfig
from runtime.layout.takeover import home_holders, takeover
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
    return _count(
        config.model, config.train.seq_len, rack.gpus, live, limits, rack.power_budget_w,
        dead_slot_w, config.power.curve,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _count(
    model: ModelConfig,
    seq_len: int,
    num_slots: int,
    live: tuple[int, ...],
    limits: PowerLimits,
    budget_w: float,
    dead_slot_w: float,
    curve: tuple[tuple[float, float], ...],
) -> int:
    home = home_holders(model, num_slots)

    def lose(more: int) -> RackPower | None:
        left = live[: len(live) - more]
        if not left:
            return None
        work = work_by_slot(model, seq_len, takeover(model, home, home, left), num_slots)
        alive = frozenset(left)
        return RackPower(
            loads=tuple(work[slot] if slot in alive else 0.0 for slot in range(num_slots)),
            live=left,
            limits=limits,
            budget_w=budget_w,
            dead_slot_w=dead_slot_w,
            curve=curve,
        )

    return boostable_failures(lose, len(live))
