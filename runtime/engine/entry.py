"""What entering a generation derives from its plan: seat, groups, agreement, stepper."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from runtime.config import Config, ModelConfig, TrainConfig
from runtime.engine.data import Text
from runtime.engine.fail_points import Point
from runtime.engine.group import Group
from runtime.engine.groups import GroupBuilder
from runtime.engine.model import SlotModel
from runtime.engine.state import State
from runtime.engine.step import Stepper
from runtime.engine.sync import GradientSync
from runtime.engine.watch import Watch
from runtime.engine.wiring import plan_direct, plan_reshard
from runtime.errors import DigestMismatch, PlanError
from runtime.layout.shares import shares_by_slot
from runtime.layout.sync import canonical_units, member_replicas
from runtime.layout.units import STORED_FAMILIES, Held, held_units
from runtime.plan.generation import GenerationPlan, ReplicaPlan


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in a plan. first_rank: world rank of its replica's first live slot."""

    rank: int
    replica: ReplicaPlan
    first_rank: int
    held: Held

    @property
    def slots(self) -> tuple[int, ...]:
        """World ranks of the replica's live slots."""
        return tuple(range(self.first_rank, self.first_rank + self.replica.degree))


@dataclass(frozen=True, slots=True)
class GenerationGroups:
    """The process groups a rank is in; `bind_sync` makes the gradient sync over a state."""

    world: Group
    replica: Group
    every: tuple[Group, ...]
    bind_sync: Callable[[TrainConfig, State], GradientSync]


def find_seat(model: ModelConfig, plan: GenerationPlan, gpu: str) -> Seat:
    """Where `gpu` sits in `plan`.

    Raises:
        PlanError: it is no member.
    """
    for first_rank, replica in member_replicas(plan):
        for position, slot in enumerate(replica.live):
            if replica.gpus[slot] == gpu:
                held = held_units(model, replica.holders, slot)
                return Seat(first_rank + position, replica, first_rank, held)
    raise PlanError(f"{gpu} is no member of generation {plan.generation}")


def build_groups(
    builder: GroupBuilder, config: Config, plan: GenerationPlan, seat: Seat
) -> GenerationGroups:
    """Build world, replica and sync groups; every member of the plan must call it.

    Norms sync over the world group itself. A replica's group is never shared with the sync, whose
    order of collectives differs.

    Raises:
        GenerationAborted: aborted, or a member did not come. DigestMismatch: plans differ.
    """
    strategy = {"direct": plan_direct, "reshard": plan_reshard}[config.train.sync]
    wiring = strategy(config.model, plan, seat.rank, seat.slots)
    everyone = tuple(range(len(plan.members())))
    wanted = [("world", everyone), (f"replica-{seat.replica.replica}", seat.slots), *wiring.wanted]
    every = builder.build(plan, wanted)
    world, replica, *rest = every
    return GenerationGroups(
        world, replica, tuple(every), lambda train, state: wiring.bind(train, state, world, rest)
    )


def compare_members(
    config: Config, text: Text, applied_step: int, plan: GenerationPlan, world: Group
) -> None:
    """Compare configuration, text and applied steps over the world; every member must call it.

    applied_step: of this rank; -1 if it cannot go on, so that all ranks fail alike.

    Raises:
        DigestMismatch: says which member differs in what.
    """
    # The text's path may differ from host to host; its bytes are compared.
    shared = (config.model, msgspec.structs.replace(config.train, text=""))
    digest = hashlib.blake2b(msgspec.json.encode(shared), digest_size=7).digest()
    mine = [int.from_bytes(digest, "big"), text.checksum, applied_step]
    rows = world.all_gather(torch.tensor(mine, dtype=torch.int64, device=world.device)).tolist()
    wanted = (*rows[0][:2], plan.applied_step)
    for member, row in zip(plan.members(), rows, strict=True):
        for what, has, wants in zip(
            ("configuration", "text", "applied step"), row, wanted, strict=True
        ):
            if has != wants:
                raise DigestMismatch(
                    f"generation {plan.generation}: {what} of {member} is {has}, not {wants}"
                )


@dataclass(frozen=True, slots=True)
class Tools:
    """What a rank brings to every generation."""

    config: Config
    text: Text
    watch: Watch
    at: Callable[[Point], None]


def prepare_stepper(
    tools: Tools, plan: GenerationPlan, seat: Seat, state: State, groups: GenerationGroups
) -> Stepper:
    """Bind model, gradient sync and commit to a state laid out as `seat` says."""
    model, train = tools.config.model, tools.config.train
    sync = groups.bind_sync(train, state)
    slot_model = None
    if seat.replica.mode == "training":
        slot = seat.replica.live[seat.rank - seat.first_rank]
        shares = {
            family: shares_by_slot(seat.replica.holders, family, (slot,))[slot]
            for family in STORED_FAMILIES
        }
        slot_model = SlotModel(model, state, groups.replica, train, shares)
        slot_model.on_gradient(sync.ready)
    return Stepper(
        train=train,
        plan=plan,
        replica=seat.replica,
        rank=seat.rank,
        state=state,
        model=slot_model,
        sync=sync,
        world=groups.world,
        text=tools.text,
        watch=tools.watch,
        counted=state.layout.spans(canonical_units(model, plan, seat.rank)),
        reports_loss=seat.rank == seat.first_rank,
        at=tools.at,
    )
