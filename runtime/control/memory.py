"""What a restarted controller must know to take over a run that goes on without it.

The journal holds what happened (steps, ledger, proposals, decisions); a `Memory` beside it holds
the little that it does not say; every plan has a file of its own. Pure: the controller reads and
writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from runtime.control.change import Change
from runtime.control.checkpoints import CheckpointMemory
from runtime.control.examiner import ExaminerMemory
from runtime.control.fleet import Facts, WorkerStatus
from runtime.control.succession import Aim
from runtime.plan.generation import GenerationPlan
from runtime.plan.manifest import Start
from storage.records import JournalEntry, Proposal, ProposalChanged, RunEnded, RunRolledBack

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's worker as last seen."""

    status: WorkerStatus
    pid: int
    slowness: float


class ChangeMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The change under way, as in `coordinator.Change`; what ends the run is not kept."""

    cause: str
    planned: bool
    began_at: float
    proposal: str
    restart: bool = False


class AimMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's aim, as in `succession.Aim`."""

    replica: int
    mode: str
    live: tuple[int, ...]
    num_samples: int
    caps_w: tuple[float, ...]


class DeskMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the desk knows beside its proposals: what each stands and falls with, what was answered
    with no, how many were opened, evidence by replica."""

    facts: dict[str, Facts | None]
    dismissed: tuple[Facts, ...]
    opened: int
    evidence: dict[int, list[tuple[float, str]]]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """State of a coordinator beyond journal and plans. position: last command that was read.
    seats: by replica, the GPU in every slot.
    paused: why it shall stand still, "" when it shall not."""

    run: str
    generation: int
    phase: str
    change: ChangeMemory
    aims: tuple[AimMemory, ...]
    gpus: dict[str, GpuMemory]
    desk: DeskMemory
    start: Start
    position: str = ""
    budgets_w: dict[str, float] = {}
    caps_told: dict[str, tuple[int, int]] = {}
    health: ExaminerMemory = ExaminerMemory()
    paused: str = ""
    seats: tuple[tuple[str, ...], ...] = ()
    checkpoint: CheckpointMemory = CheckpointMemory()


def remember(coordinator: Coordinator, position: str) -> Memory:
    """What to write down now."""
    change = coordinator.change
    return Memory(
        run=coordinator.run,
        generation=coordinator.number,
        phase=coordinator.phase,
        change=ChangeMemory(
            cause=change.cause,
            planned=change.planned,
            began_at=change.began_at,
            proposal=change.proposal,
            restart=change.restart,
        ),
        aims=tuple(
            AimMemory(
                replica=aim.replica,
                mode=aim.mode,
                live=aim.live,
                num_samples=aim.num_samples,
                caps_w=aim.caps_w,
            )
            for aim in coordinator.aims
        ),
        gpus={
            view.gpu: GpuMemory(status=view.status, pid=view.pid, slowness=view.slowness)
            for view in coordinator.fleet
        },
        desk=coordinator.desk.memory(),
        start=coordinator.start,
        position=position,
        budgets_w=dict(coordinator.power.budgets_w),
        caps_told=dict(coordinator.power.told),
        health=coordinator.examiner.memory(),
        paused=coordinator.pausing.why,
        checkpoint=coordinator.checkpoints.memory(),
        seats=tuple(coordinator.fleet.seats(aim.replica) for aim in coordinator.aims),
    )


def recall(
    coordinator: Coordinator,
    memory: Memory,
    plans: Mapping[int, GenerationPlan],
    entries: Iterable[JournalEntry],
    now: float,
) -> None:
    """Bring a fresh coordinator to where the last one was, and go on from there.

    Workers have gone on training meanwhile; their agents tell all they committed again. A
    generation that was just forming cannot find its rendezvous any more: it is left for the next.
    """
    proposals: dict[str, Proposal] = {}
    back: RunRolledBack | None = None
    for entry in entries:
        coordinator.progress.replay(entry)
        coordinator.desk.policy.replay(entry)
        coordinator.desk.intake.replay(entry)
        if isinstance(entry, ProposalChanged):
            proposals[entry.proposal.id] = entry.proposal
        back = entry if isinstance(entry, RunRolledBack) else back
        assert not isinstance(entry, RunEnded), "an ended run is not restored"
    for gpu, seen in memory.gpus.items():
        if gpu in coordinator.fleet:
            view = coordinator.fleet[gpu]
            view.status, view.pid, view.slowness = seen.status, seen.pid, seen.slowness
            view.since = view.pulse_at = now
    coordinator.progress.replayed(now)
    coordinator.power.recall(memory.budgets_w, memory.caps_told)
    coordinator.examiner.recall(memory.health)
    coordinator.checkpoints.recall(memory.checkpoint)
    coordinator.desk.recall(memory.desk, proposals)
    coordinator.generations.recall(plans, lost_up_to=back.generation if back is not None else 0)
    for replica, gpus in enumerate(memory.seats):
        coordinator.fleet.recall_seats(replica, gpus)
    plan = coordinator.plan
    if plan is not None and plan.generation > memory.generation:
        for one in plan.replicas:
            coordinator.fleet.recall_seats(one.replica, one.gpus)
    coordinator.start = memory.start
    if back is not None:
        coordinator.start = Start(checkpoint=back.checkpoint, run=back.run, step=back.step)
    coordinator.progress.start_step = coordinator.start.step
    _take_over(coordinator, memory, now)
    coordinator.power.take_over(coordinator.plan)


def _take_over(coordinator: Coordinator, memory: Memory, now: float) -> None:
    """Go on with what the last controller was doing."""
    change = memory.change
    # A plan newer than the memory was published in the last moment.
    phase = memory.phase if coordinator.number == memory.generation else "entering"
    coordinator.aims = [Aim(**msgspec.structs.asdict(aim)) for aim in memory.aims]
    coordinator.change = coordinator.led_here = Change(
        cause=change.cause,
        planned=change.planned,
        began_at=change.began_at,
        proposal=change.proposal,
        restart=change.restart,
    )
    last = coordinator.progress.last
    coordinator.progress.formed = last is not None and last.generation == coordinator.number
    coordinator.event("controller_restarted", "warning", "the controller took the run over", now)
    if coordinator.plan is None:
        return
    coordinator.examiner.generation_published(coordinator.plan)
    coordinator.set_phase("training", now)
    if coordinator.generations.previous is None:
        coordinator.fallback.recall(coordinator, now)
    elif phase == "entering" and not coordinator.progress.formed:
        cause = f"the controller restarted while generation {coordinator.number} formed"
        coordinator.leave(replace(coordinator.change, cause=cause, planned=False), now)
    elif phase in ("leaving", "saving", "paused", "restoring"):
        coordinator.pausing.recall(coordinator, memory.paused, now, still=phase == "paused")
        if phase != "paused":
            coordinator.leave(coordinator.change, now)
    coordinator.desk.carry_out_approved(coordinator, now)
