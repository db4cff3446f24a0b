"""What one generation is: shape, layouts, batch plan, power plan, and how to get into it.

The controller writes a `GenerationPlan`, every rank executes it without asking further. Everything
a rank does (its groups, its samples, what it sends and receives) derives from this one value, so
equal digests mean equal behaviour. Pure: no torch, no store, no clock.
"""

from __future__ import annotations

import hashlib

import msgspec

NO_HOLDER = -1

# Gradient norm of a step that is counted but applied nowhere: it was not finite.
NOT_FINITE = -1.0

# Family name -> for every unit, the slot that holds it (`NO_HOLDER`: a standby replica's hole).
# Key/value heads and replicated parameters are derived (runtime.layout), never stored.
# A family whose units are shared by sample has turns: sample i of its replica is worked on as entry
# `turn_key(family, i mod turns)` says, and a unit is held by its slots of all turns. Every entry is
# a whole map, equal for units that are not shared.
Holders = dict[str, tuple[int, ...]]


def turn_key(family: str, turn: int) -> str:
    """Key of `Holders` under which a turn of a family is kept; turn 0 is the family itself."""
    return f"{family}@{turn}" if turn else family


class ReplicaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One replica within a generation.

    mode: "training" computes samples; "standby" computes nothing but receives every synchronised
        gradient of the units it holds and applies it, so that it can rejoin at once; "out" has no
        live slot.
    live: live slots, ascending. gpus: the GPU id (`rack/slot`) of every slot, dead ones included.
    num_samples: samples of each step this replica computes (0 unless training).
    caps_w: power cap of every slot in watts (0.0 for dead slots).
    """

    replica: int
    rack: str
    mode: str
    gpus: tuple[str, ...]
    live: tuple[int, ...]
    holders: Holders
    num_samples: int = 0
    caps_w: tuple[float, ...] = ()

    @property
    def degree(self) -> int:
        return len(self.live)


class RollForward(msgspec.Struct, frozen=True, kw_only=True):
    """Some rank applied `step` before the failure: whoever has not, applies it with these values.

    grad_norm: the clip norm of that step, as computed by the commit reduction.
    """

    step: int
    grad_norm: float


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """State that members of one replica bring along, and the holders by which it is laid out.

    gpus: whose state. slots: which column of `holders` each of them is.
    """

    replica: int
    gpus: tuple[str, ...]
    slots: tuple[int, ...]
    holders: Holders


class GenerationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a rank needs to enter generation `generation`.

    applied_step: number of optimizer steps every source has applied once `roll_forward` is done;
        the next step to train is this number (steps count from 0).
    sources: members that bring valid state, each in one source. Empty means: from the checkpoint
        in the folder `checkpoint`, or, without one, from the config's seed.
    store_host/store_port: the TCPStore for rendezvous; keys are prefixed `run/generation/`.
    """

    run: str
    generation: int
    store_host: str
    store_port: int
    replicas: tuple[ReplicaPlan, ...]
    applied_step: int = 0
    roll_forward: RollForward | None = None
    sources: tuple[Source, ...] = ()
    checkpoint: str = ""
    planned: bool = False

    def members(self) -> tuple[str, ...]:
        """GPU ids of every rank, in world rank order: by replica, then by slot."""
        return tuple(
            plan.gpus[slot] for plan in self.replicas if plan.mode != "out" for slot in plan.live
        )

    def layout_of(self, gpu: str) -> tuple[Holders, int] | None:
        """Holders and slot by which the state of `gpu` is laid out; None if it brings none."""
        for source in self.sources:
            if gpu in source.gpus:
                return source.holders, source.slots[source.gpus.index(gpu)]
        return None

    def first_sample(self, replica: int, step: int) -> int:
        """First of the `num_samples` sample indices that `replica` takes of `step`."""
        before = sum(plan.num_samples for plan in self.replicas if plan.replica < replica)
        return step * self.global_batch + before

    @property
    def global_batch(self) -> int:
        return sum(plan.num_samples for plan in self.replicas)

    def digest(self) -> str:
        """Hex digest over the whole plan; ranks compare it before they trust each other."""
        return hashlib.blake2b(
            msgspec.json.encode(self, order="sorted"), digest_size=16
        ).hexdigest()


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's word after an abort; the controller's vote over these decides where to go on.

    applied_step: optimizer steps applied. layout_generation: generation whose layout its tensors
    follow (0: none, fresh process). synced: it holds the synchronised gradients of step
    `applied_step`, not yet applied. grad_norm: norm of the last applied step, when it knows it.
    """

    gpu: str
    generation: int
    applied_step: int
    layout_generation: int
    synced: bool = False
    grad_norm: float | None = None
