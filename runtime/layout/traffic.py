"""Gradient bytes that a sync strategy moves between slots of one replica. Pure.

Counted are the rows that slots hold apart (heads, blocks). Norms are left out: every slot holds
them, so every strategy sums them over all slots alike.
"""

from __future__ import annotations

from runtime.config import ModelConfig
from runtime.layout.reshard import flow_bytes, reshard_plan
from runtime.layout.sync import member_replicas, sync_groups
from runtime.layout.units import unit_elements
from runtime.plan.generation import GenerationPlan


def intra_rack_bytes(
    model: ModelConfig, plan: GenerationPlan, sync: str, element_bytes: int = 4
) -> dict[int, int]:
    """Bytes sent per step inside each replica's rack, by replica, by the strategy `sync`.

    Where slots of one replica share a unit (key/value heads), `direct` sums over them: k sharers
    send at least `2 (k - 1)` times its bytes. `reshard` sends every handed-over row there and back.
    """
    found: dict[int, int] = {}
    for base, replica in member_replicas(plan):
        slots = range(base, base + replica.degree)
        if sync == "reshard":
            flows = [flow for flow in reshard_plan(model, plan).handovers if flow.src in slots]
            found[replica.replica] = 2 * flow_bytes(model, flows, element_bytes)
            continue
        elements = sum(
            2 * (sum(rank in slots for rank in group.ranks) - 1) * len(units)
            * unit_elements(model, family)
            for group in sync_groups(model, plan)
            if any(rank in slots for rank in group.ranks)
            for family, units in group.units.items()
            if family != "replicated"
        )  # fmt: skip
        found[replica.replica] = elements * element_bytes
    return found
