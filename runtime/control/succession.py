"""From one generation to the next: who has which state, what the vote says, who holds what then.

Pure. The vote (DESIGN section 5): if any surviving rank applied the step, all that hold its
synchronised gradients apply it too; if none has, it is dropped and run again. Whoever is behind by
more comes as an empty rank and fetches its state. It knows nothing of proposals or processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from runtime.config import Config
from runtime.errors import PlanError
from runtime.layout.fractional import layout_for
from runtime.layout.move import move_plan
from runtime.layout.takeover import home_holders
from runtime.layout.units import without
from runtime.plan.generation import (
    GenerationPlan,
    ReplicaPlan,
    RollForward,
    Source,
    Standing,
)
from runtime.plan.manifest import Start


class StateLost(PlanError):
    """Some unit has no live holder left; only a checkpoint could bring it back."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What a replica shall be in the next generation. caps_w: one per slot, 0.0 for dead ones."""

    replica: int
    mode: str
    live: tuple[int, ...]
    num_samples: int
    caps_w: tuple[float, ...]


def whole_aims(config: Config) -> list[Aim]:
    """Every replica whole at its normal caps; samples are shared out later."""
    return [
        Aim(
            replica=replica,
            mode="training",
            live=tuple(range(rack.gpus)),
            num_samples=0,
            caps_w=(config.emulated.normal_cap_w,) * rack.gpus,
        )
        for replica, rack in enumerate(config.cluster.racks)
    ]


def aims_of(plan: GenerationPlan) -> list[Aim]:
    """The shape of `plan` once more."""
    return [
        Aim(
            replica=one.replica,
            mode=one.mode,
            live=one.live,
            num_samples=one.num_samples,
            caps_w=one.caps_w,
        )
        for one in plan.replicas
    ]


@dataclass(frozen=True, kw_only=True)
class Vote:
    """Outcome of a vote: steps applied once all have caught up, how to, and who has the state."""

    applied_step: int
    roll_forward: RollForward | None
    holders: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Past:
    """What a generation follows.

    history: plans of earlier generations that standings may refer to.
    previous: plan of the last generation that was published, None at the start of a run.
    seats: by replica, the GPU in every slot; () is as the run started.
    standings: newest standing by GPU id of every rank that lives.
    committed_steps: steps known to be committed; the members' state must not be older.
    told_norm: gradient norm of the last of them, as told when it was committed.
    start: where the run began; until its first step is committed everybody starts from there.
    """

    history: Mapping[int, GenerationPlan]
    previous: GenerationPlan | None
    standings: Mapping[str, Standing]
    committed_steps: int
    start: Start
    told_norm: float | None = None
    seats: Sequence[tuple[str, ...]] = ()


def vote(
    standings: Sequence[Standing],
    start_step: int = 0,
    *,
    committed_steps: int = 0,
    told_norm: float | None = None,
) -> Vote:
    """Decide where to go on from what survivors report; without any state that is `start_step`.

    A commit that was told (`committed_steps`, `told_norm`) counts as a rank that applied the step,
    even if all ranks that did are gone.
    """
    with_state = [s for s in standings if s.layout_generation > 0]
    if not with_state:
        return Vote(applied_step=start_step, roll_forward=None, holders=())
    newest = max(s.applied_step for s in with_state)
    told = told_norm is not None and committed_steps == newest + 1
    if told and any(s.synced and s.applied_step == newest for s in with_state):
        newest = committed_steps
    behind = [s for s in with_state if s.applied_step == newest - 1 and s.synced]
    norms = [
        s.grad_norm for s in with_state if s.applied_step == newest and s.grad_norm is not None
    ]
    if told_norm is not None and committed_steps == newest:
        norms.append(told_norm)
    roll = None
    if behind and norms:
        roll = RollForward(step=newest - 1, grad_norm=norms[0])
    current = [s.gpu for s in with_state if s.applied_step == newest]
    catching_up = [s.gpu for s in behind] if roll is not None else []
    return Vote(
        applied_step=newest, roll_forward=roll, holders=tuple(sorted({*current, *catching_up}))
    )


def succeed(
    config: Config,
    *,
    run: str,
    number: int,
    store: tuple[str, int],
    past: Past,
    aims: Sequence[Aim],
    planned: bool,
) -> tuple[GenerationPlan, int]:
    """Write the plan of generation `number`; returns it with the bytes that will move.

    Args:
        store: (host, port) of the TCPStore for rendezvous.
        aims: one per replica, in replica order.

    Raises:
        StateLost: some unit of the newest state has no holder among the members.
        PlanError: no replica trains.
    """
    if not any(aim.mode == "training" for aim in aims):
        raise PlanError("no replica trains in the next generation")
    standings, before, start = past.standings, past.previous, past.start
    replicas = tuple(
        _replica_plan(
            config,
            aim,
            past.seats[aim.replica] if past.seats else config.cluster.racks[aim.replica].seats,
            before.replicas[aim.replica] if before else None,
        )
        for aim in aims
    )
    draft = GenerationPlan(
        run=run,
        generation=number,
        store_host=store[0],
        store_port=store[1],
        replicas=replicas,
        planned=planned,
    )
    members = [gpu for gpu in draft.members() if gpu in standings]
    # A layout so old that its plan is forgotten is no layout: the rank comes empty.
    voters = [standings[gpu] for gpu in members if standings[gpu].layout_generation in past.history]
    outcome = vote(
        voters, start.step, committed_steps=past.committed_steps, told_norm=past.told_norm
    )
    if outcome.applied_step < past.committed_steps:
        raise StateLost(
            f"{past.committed_steps} steps were committed, but "
            + (
                f"the newest live state is that of step {outcome.applied_step}"
                if outcome.holders
                else "no live GPU holds any state"
            )
        )
    sources: tuple[Source, ...] = ()
    if outcome.applied_step > start.step:
        sources = _sources([standings[gpu] for gpu in outcome.holders], past.history)
    plan = msgspec.structs.replace(
        draft,
        applied_step=outcome.applied_step,
        roll_forward=outcome.roll_forward,
        sources=sources,
        checkpoint="" if sources else start.checkpoint,
    )
    try:
        moves = move_plan(config.model, plan)
    except PlanError as error:
        raise StateLost(str(error)) from error
    return plan, moves.num_bytes(config.model)


def _replica_plan(
    config: Config, aim: Aim, gpus: tuple[str, ...], before: ReplicaPlan | None
) -> ReplicaPlan:
    rack = config.cluster.racks[aim.replica]
    home = home_holders(config.model, rack.gpus)
    holders = before.holders if before is not None and before.holders else home
    dead = [slot for slot in range(rack.gpus) if slot not in aim.live]
    if aim.mode == "training":
        racks = len(config.cluster.racks)
        holders = layout_for(config.model, config.train, racks, home, holders, aim.live)
    else:
        holders = without(holders, dead)
    return ReplicaPlan(
        replica=aim.replica,
        rack=rack.name,
        mode=aim.mode,
        gpus=gpus,
        live=aim.live,
        holders=holders,
        num_samples=aim.num_samples,
        caps_w=aim.caps_w,
    )


def _sources(
    standings: Sequence[Standing], history: Mapping[int, GenerationPlan]
) -> tuple[Source, ...]:
    """Where the state is: one source per layout generation and replica, so that it stays small."""
    claims: dict[int, set[str]] = {}
    for standing in standings:
        claims.setdefault(standing.layout_generation, set()).add(standing.gpu)
    found = []
    for number, gpus in sorted(claims.items()):
        for replica in history[number].replicas:
            slots = [slot for slot, gpu in enumerate(replica.gpus) if gpu in gpus]
            if slots:
                found.append(
                    Source(
                        replica=replica.replica,
                        gpus=tuple(replica.gpus[slot] for slot in slots),
                        slots=tuple(slots),
                        holders=replica.holders,
                    )
                )
        if lost := gpus - {gpu for source in found for gpu in source.gpus}:
            raise PlanError(
                f"{min(lost)} claims the layout of generation {number}, but is not in it"
            )
    return tuple(found)
