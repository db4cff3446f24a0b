"""Groups and moves at full scale: 128 replicas of 72 slots, 16 of them reduced, 4,096 units.

Arithmetic over layouts, no process: how many process groups the `direct` strategy needs, how many a
rank is in, and how many bytes move when 16 slots die, beside what the dead held: heirs also need
the key/value heads of the query heads they get, and every sharer of a unit a copy.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any, Literal

from runtime.bench.benchmark import Say
from runtime.config import ModelConfig, TrainConfig
from runtime.layout.fractional import layout_for
from runtime.layout.move import TENSORS_PER_ELEMENT, move_plan
from runtime.layout.sync import sync_groups
from runtime.layout.takeover import home_holders
from runtime.layout.units import STORED_FAMILIES, held_by_slot, unit_elements
from runtime.plan.generation import GenerationPlan, ReplicaPlan, Source

REPLICAS, SLOTS, REDUCED = 128, 72, 16
MODEL = ModelConfig(
    num_layers=100,
    hidden=20480,
    num_query_heads=128,
    num_kv_heads=8,
    head_dim=160,
    mlp_hidden=2048 * 40,
    mlp_block=40,
    vocab=1920 * 64,
    vocab_block=64,
)


def measure_scale(say: Say) -> dict[str, Any]:
    """Figures per way to share out: whole units, and units shared by sample."""
    found: dict[str, Any] = {}
    ways: tuple[tuple[str, Literal["off", "auto"]], ...] = (("whole", "off"), ("shared", "auto"))
    for name, fractional in ways:
        began = time.perf_counter()
        plan = _plan(fractional)
        groups = sync_groups(MODEL, plan)
        ranks = Counter(rank for group in groups for rank in group.ranks)
        moved = move_plan(MODEL, plan).num_bytes(MODEL)
        took_s = time.perf_counter() - began
        least = _held_by_the_dead(plan)
        found |= {
            f"groups_{name}": len(groups),
            f"groups_a_rank_{name}": max(ranks.values()),
            f"moved_gb_{name}": round(moved / 1e9, 1),
            f"moved_over_held_{name}": round(moved / least, 3),
            f"plan_s_{name}": round(took_s, 2),
        }
        say(
            f"{REPLICAS} x {SLOTS}, {REDUCED} reduced, {name}: {len(groups)} groups, at most "
            f"{max(ranks.values())} a rank; {moved / 1e9:.0f} GB move, the dead held "
            f"{least / 1e9:.0f} GB"
        )
    return found


def _plan(fractional: Literal["off", "auto"]) -> GenerationPlan:
    """The generation after one slot of every one of the first replicas has died."""
    train = TrainConfig(
        global_batch=8 * REPLICAS, micro_batch=8, seq_len=16384, fractional=fractional
    )
    home, dead = home_holders(MODEL, SLOTS), random.Random(0)
    replicas, sources = [], []
    for number in range(REPLICAS):
        gone = dead.randrange(SLOTS) if number < REDUCED else -1
        live = tuple(slot for slot in range(SLOTS) if slot != gone)
        gpus = tuple(f"rack-{number}/{slot}" for slot in range(SLOTS))
        replicas.append(
            ReplicaPlan(
                replica=number,
                rack=f"rack-{number}",
                mode="training",
                gpus=gpus,
                live=live,
                holders=layout_for(MODEL, train, REPLICAS, home, home, live),
                num_samples=8,
            )
        )
        held = tuple(gpus[slot] for slot in live)
        sources.append(Source(replica=number, gpus=held, slots=live, holders=home))
    return GenerationPlan(
        run="scale",
        generation=2,
        store_host="",
        store_port=0,
        replicas=tuple(replicas),
        applied_step=1,
        sources=tuple(sources),
    )


def _held_by_the_dead(plan: GenerationPlan) -> int:
    """Bytes of parameters and moments that no slot of its replica holds any more."""
    home = held_by_slot(MODEL, home_holders(MODEL, SLOTS), range(SLOTS))
    units = Counter(
        {
            family: sum(
                len(home[slot][family])
                for replica in plan.replicas
                for slot in range(SLOTS)
                if slot not in replica.live
            )
            for family in STORED_FAMILIES
        }
    )
    elements = sum(count * unit_elements(MODEL, family) for family, count in units.items())
    return 4 * TENSORS_PER_ELEMENT * elements
