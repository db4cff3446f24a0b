"""How a replica stands: what a proposal is about, and the same in words. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.control.fleet import Facts
from runtime.control.situations import fit_spares

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator


def some_replica_trains(coordinator: Coordinator) -> bool:
    """Whether some replica trains while a proposal waits."""
    plan = coordinator.plan
    return plan is not None and any(replica.mode == "training" for replica in plan.replicas)


def standing_words(coordinator: Coordinator, replica: int) -> str:
    """What is seen of a replica: `replica 0 stands by with slots 0, 2; no worker on slot 1`."""
    _, mode, live, alive, left_out, spares = facts_of(coordinator, replica)
    assert coordinator.plan is not None
    num_slots = len(coordinator.plan.replicas[replica].gpus)
    does = {"training": "trains with", "standby": "stands by with"}.get(mode, "is out; it had")
    parts = [f"replica {replica} {does} {len(live)} of {num_slots} slots"]
    if dead := [slot for slot in range(num_slots) if slot not in alive]:
        parts.append(f"no worker on slot {', '.join(map(str, dead))}")
    if back := [slot for slot in alive if slot not in live and slot not in left_out]:
        parts.append(f"a fresh worker on slot {', '.join(map(str, back))}")
    if left_out:
        parts.append(f"slot {', '.join(map(str, left_out))} is slow or about to fail")
    if spares:
        parts.append(f"spare: {', '.join(spares)}")
    return "; ".join(parts)


def facts_of(coordinator: Coordinator, replica: int) -> Facts:
    """What a proposal for `replica` stands and falls with."""
    assert coordinator.plan is not None
    plan = coordinator.plan.replicas[replica]
    alive = coordinator.fleet.alive(replica)
    left_out = coordinator.examiner.left_out(coordinator.fleet.seats(replica)).slots
    still_there = tuple(slot for slot in left_out if slot in alive)
    spares = fit_spares(coordinator, replica)
    return (replica, plan.mode, plan.live, alive, still_there, spares)
