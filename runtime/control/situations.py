"""The run as the planner sees it, and the planner's targets turned into aims. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from runtime.config import Config
from runtime.control.succession import Aim
from runtime.layout.takeover import home_holders
from runtime.plan.situation import ReplicaSituation, ReplicaTarget, Situation

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator
    from runtime.control.followup import Followup


def situation_of(
    coordinator: Coordinator,
    followup: Followup,
    left_out: Mapping[int, tuple[int, ...]] | None = None,
) -> Situation:
    """Every replica as it stands: live slots hold state, returned ones have only a worker.

    left_out: replica -> live slots to leave out, where it is not the examiner that says so.
    """
    power = coordinator.power
    return Situation(
        config=_planned_for(coordinator),
        dead_slot_w=power.dead_slot_w,
        no_boost=power.no_boost,
        replicas=tuple(
            _replica(coordinator, replica, (left_out or {}).get(replica))
            for replica in range(len(coordinator.config.cluster.racks))
        ),
        calibration=followup.calibration,
        costs=followup.costs,
        no_restart=coordinator.checkpoints.obstacle,
    )


def _replica(
    coordinator: Coordinator, replica: int, wanted: tuple[int, ...] | None
) -> ReplicaSituation:
    config = coordinator.power.config
    rack = config.cluster.racks[replica]
    home = home_holders(config.model, rack.gpus)
    gpus = coordinator.fleet.seats(replica)
    alive = coordinator.fleet.alive(replica)
    slowness = tuple(coordinator.examiner.slowness(gpu) for gpu in gpus)
    found = coordinator.examiner.left_out(gpus)
    leaving, slow = (found.unfit, found.slow) if wanted is None else (wanted, ())
    normal = (config.emulated.normal_cap_w,) * rack.gpus
    if coordinator.generations.previous is None:
        return ReplicaSituation(
            replica=replica,
            rack=rack.name,
            mode="training",
            gpus=gpus,
            home=home,
            holders=home,
            live=alive,
            caps_w=normal,
            slowness=slowness,
        )
    plan = coordinator.generations.previous.replicas[replica]
    # A GPU that has just taken a slot's place holds nothing yet.
    live = tuple(slot for slot in plan.live if slot in alive and plan.gpus[slot] == gpus[slot])
    left_out = tuple(slot for slot in leaving if slot in live)
    return ReplicaSituation(
        replica=replica,
        rack=rack.name,
        mode=plan.mode,  # type: ignore[arg-type]
        gpus=gpus,
        home=home,
        holders=plan.holders,
        live=live,
        returned=tuple(slot for slot in alive if slot not in live and slot not in leaving),
        left_out=left_out,
        unfit=wanted is None and bool(left_out),
        slow=tuple(slot for slot in slow if slot in alive),
        caps_w=tuple(
            cap or config.emulated.normal_cap_w
            for cap in (coordinator.power.wished_w(replica) or plan.caps_w or normal)
        ),
        slowness=slowness,
        spares=fit_spares(coordinator, replica),
    )


def fit_spares(coordinator: Coordinator, replica: int) -> tuple[str, ...]:
    """Spares of a replica's rack that nothing speaks against."""
    spares = coordinator.fleet.spares(replica)
    unfit = coordinator.examiner.left_out(spares).slots
    return tuple(gpu for place, gpu in enumerate(spares) if place not in unfit)


def _planned_for(coordinator: Coordinator) -> Config:
    """The configuration with budgets less what idle spares draw of them."""
    config = coordinator.power.config
    idle_w = config.emulated.min_cap_w
    racks = tuple(
        msgspec.structs.replace(
            rack,
            power_budget_w=rack.power_budget_w - idle_w * len(coordinator.fleet.spares(replica)),
        )
        if rack.power_budget_w
        else rack
        for replica, rack in enumerate(config.cluster.racks)
    )
    cluster = msgspec.structs.replace(config.cluster, racks=racks)
    return msgspec.structs.replace(config, cluster=cluster)


def aim_for(target: ReplicaTarget) -> Aim:
    return Aim(
        replica=target.replica,
        mode=target.mode,
        live=target.live,
        num_samples=target.num_samples,
        caps_w=target.caps_w,
    )
