"""The process groups that a sync strategy needs on one rank, and the sync bound to them.

One function per strategy; both derive everything from the plan, so all ranks list the groups that
they share in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.config import ModelConfig, TrainConfig
from runtime.engine.group import Group
from runtime.engine.passage import Lanes
from runtime.engine.reshard import ReshardSync
from runtime.engine.state import State
from runtime.engine.sync import DirectSync, GradientSync, bucket_elements
from runtime.layout.reshard import reshard_plan, stages
from runtime.layout.sync import buckets, sync_groups
from runtime.plan.generation import GenerationPlan

Bind = Callable[[TrainConfig, State, Group, Sequence[Group]], GradientSync]


@dataclass(frozen=True, slots=True)
class Wiring:
    """wanted: groups beside world and replica, as (name, world ranks).

    bind: makes the sync from (settings, state, world group, the groups wanted, built).
    """

    wanted: tuple[tuple[str, tuple[int, ...]], ...]
    bind: Bind


def plan_direct(
    model: ModelConfig, plan: GenerationPlan, rank: int, slots: tuple[int, ...]
) -> Wiring:
    """One group per set of holders that `rank` is in; norms sync over the world group itself.

    slots: world ranks of the replica that `rank` is in.
    """
    everyone = tuple(range(len(plan.members())))
    mine = [group for group in sync_groups(model, plan) if rank in group.ranks]
    apart = [group for group in mine if group.ranks != everyone]

    def bind(
        train: TrainConfig, state: State, world: Group, built: Sequence[Group]
    ) -> GradientSync:
        lanes = dict(zip([group.index for group in apart], built, strict=True))
        lanes |= {group.index: world for group in mine if group.ranks == everyone}
        limit = bucket_elements(train.bucket_mb, state.params.dtype)
        return DirectSync(buckets(model, mine, limit), lanes, state)

    return Wiring(tuple((f"sync-{group.index}", group.ranks) for group in apart), bind)


def plan_reshard(
    model: ModelConfig, plan: GenerationPlan, rank: int, slots: tuple[int, ...]
) -> Wiring:
    """Two groups over the replica if anything is handed over in it, one per position it is core of.

    slots: world ranks of the replica that `rank` is in.
    """
    resharding = reshard_plan(model, plan)
    flows = [flow for flow in resharding.handovers if flow.src in slots]
    mine = [group for group in resharding.groups[:-1] if rank in group.ranks]
    reducing = [group for group in mine if len(group.ranks) > 1]
    wanted = [(f"sync-{group.index}", group.ranks) for group in reducing]
    exchanging = [(f"out-{slots[0]}", slots), (f"back-{slots[0]}", slots)] if flows else []

    def bind(
        train: TrainConfig, state: State, world: Group, built: Sequence[Group]
    ) -> GradientSync:
        limit = bucket_elements(train.bucket_mb, state.params.dtype)
        out, back = built[:2] if flows else (None, None)
        reduce = zip([group.index for group in reducing], built[len(exchanging) :], strict=True)
        shared = [resharding.norms] if world.size > 1 else []
        return ReshardSync(
            stages(model, resharding.groups[:-1], limit),
            mine,
            flows,
            state,
            Lanes(out, back, dict(reduce)),
            DirectSync(buckets(model, shared, limit), {resharding.norms.index: world}, state),
        )

    return Wiring((*exchanging, *wanted), bind)
