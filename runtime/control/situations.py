"""The run as the planner sees it, and the planner's targets turned into aims. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from runtime.control.examiner import LeftOut
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
        config=power.config,
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
    gpus = tuple(f"{rack.name}/{slot}" for slot in range(rack.gpus))
    alive = coordinator.fleet.alive(replica)
    slowness = tuple(coordinator.examiner.slowness(gpu) for gpu in gpus)
    left_out = coordinator.examiner.left_out(gpus)
    if wanted is not None:
        left_out = LeftOut(wanted, urgent=False)
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
    live = tuple(slot for slot in plan.live if slot in alive)
    return ReplicaSituation(
        replica=replica,
        rack=rack.name,
        mode=plan.mode,  # type: ignore[arg-type]
        gpus=gpus,
        home=home,
        holders=plan.holders,
        live=live,
        returned=tuple(slot for slot in alive if slot not in live and slot not in left_out.slots),
        left_out=tuple(slot for slot in left_out.slots if slot in live),
        unfit=left_out.urgent and any(slot in live for slot in left_out.slots),
        caps_w=tuple(
            cap or config.emulated.normal_cap_w
            for cap in (coordinator.power.wished_w(replica) or plan.caps_w or normal)
        ),
        slowness=slowness,
    )


def aim_for(target: ReplicaTarget) -> Aim:
    return Aim(
        replica=target.replica,
        mode=target.mode,
        live=target.live,
        num_samples=target.num_samples,
        caps_w=target.caps_w,
    )
