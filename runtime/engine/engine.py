"""The engine of one rank: enters generations, runs steps, says where it stands.

The facade the worker drives. It owns this rank's state across generations and everything that
belongs to one generation; it knows no store but the one rendezvous uses, and decides nothing.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from runtime.config import Config
from runtime.engine.checkpoint import load_units, read_manifest, write_part
from runtime.engine.data import Text
from runtime.engine.group import Group
from runtime.engine.groups import GroupBuilder
from runtime.engine.model import SlotModel
from runtime.engine.move import Moved, move_state
from runtime.engine.optimizer import apply_step
from runtime.engine.state import State, StateLayout
from runtime.engine.step import Stepper, StepResult
from runtime.engine.sync import DirectSync, bucket_elements
from runtime.engine.watch import Watch
from runtime.errors import DigestMismatch, PlanError, UserError
from runtime.layout.move import MovePlan, move_plan
from runtime.layout.sync import SyncGroup, buckets, canonical_units, member_replicas, sync_groups
from runtime.layout.units import Held, held_units
from runtime.layout.work import slot_work
from runtime.plan.generation import GenerationPlan, ReplicaPlan, Standing
from runtime.plan.manifest import Part

# An abandoned collective frees its thread after this many step deadlines; nothing waits for it.
_TIMEOUT_DEADLINES = 6
_MIN_TIMEOUT_S = 60.0


class FailPoints(Protocol):
    """Where faults are injected: called with the name of each point as the engine passes it.

    Points: step.start, after_forward, before_sync, before_commit, after_commit, before_apply,
    after_apply, enter.groups, enter.agree, enter.move, move.before_swap, enter.ready.
    """

    def at(self, point: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterReport:
    """What entering a generation took on this rank.

    seconds: by phase ("groups", "agree", "move", "ready"). num_groups: process groups this rank
    is in, groups of one not counted.
    """

    generation: int
    seconds: dict[str, float]
    bytes_received: int
    bytes_sent: int
    num_groups: int


@dataclass(frozen=True, slots=True)
class _Seat:
    """This rank's place in a plan."""

    rank: int
    slot: int
    replica: ReplicaPlan
    first_rank: int
    held: Held


class Engine:
    """One rank's training engine.

    Args:
        gpu: this rank's GPU id (`rack/slot`).
        abort: raised by the worker when the current generation ends; the worker clears it before
            the next `enter`.
        dtype: of parameters, gradients and moments.
        fail_points: see `FailPoints`.

    Raises:
        UserError: the text is missing or too short, or the vocabulary cannot hold its bytes.
    """

    def __init__(
        self,
        config: Config,
        gpu: str,
        *,
        abort: threading.Event,
        dtype: torch.dtype = torch.float32,
        fail_points: FailPoints | None = None,
    ) -> None:
        self._config = config
        self._gpu = gpu
        self._dtype = dtype
        self._device = _device(config, gpu)
        self._at: Callable[[str], None] = fail_points.at if fail_points else lambda _: None
        self._text = Text(config.train)
        if self._text.largest_token >= config.model.vocab:
            raise UserError(
                f"`model.vocab` is {config.model.vocab}, but the text has byte "
                f"{self._text.largest_token}: set it to {self._text.largest_token + 1} or more"
            )
        control = config.control
        self._watch = Watch(
            abort,
            abort_deadline_s=control.join_deadline_s,
            streamed=config.cluster.backend == "nccl",
        )
        self._builder = GroupBuilder(
            gpu,
            config.cluster.backend,
            self._watch,
            timeout_s=max(_MIN_TIMEOUT_S, _TIMEOUT_DEADLINES * control.step_deadline_s),
            join_deadline_s=control.join_deadline_s,
        )
        self._groups: list[Group] = []
        self._generation = 0
        self._layout_generation = 0
        self._state: State | None = None
        self._plan: GenerationPlan | None = None
        self._stepper: Stepper | None = None

    @property
    def phase(self) -> str:
        """ "compute", "collective", "commit", "move" or "idle"; safe to read from any thread."""
        return self._watch.phase

    def connect(self, host: str, port: int) -> None:
        """Connect to the rendezvous store ahead of the first `enter`, which it makes quicker."""
        self._builder.connect(host, port)

    def enter(self, plan: GenerationPlan) -> EnterReport:
        """Build the plan's groups, agree with its members, take this rank's layout, get ready.

        Every member of the plan must call it. Until it returns the rank may stand on its old
        layout; `standing` says which.

        Raises:
            GenerationAborted: aborted, or a member did not come or is gone.
            DigestMismatch: members disagree on plan, configuration, text or applied steps.
            PlanError: a unit that nobody holds, or this GPU is no member.
        """
        seat = _seat(self._config, plan, self._gpu)
        moves = move_plan(self._config.model, plan)
        # Peers may still be inside the last collective of the generation we leave.
        left, self._groups, self._stepper = self._groups, [], None
        self._generation = plan.generation
        self._watch.phase = "move"
        clock = _Laps()
        try:
            self._at("enter.groups")
            world, replica, sync = self._build_groups(plan, seat)
            clock.lap("groups")
            self._at("enter.agree")
            self._agree(plan, world)
            clock.lap("agree")
            self._at("enter.move")
            moved = self._move(plan, moves, seat, world)
            world.barrier()
            clock.lap("move")
            self._at("move.before_swap")
            self._state, self._layout_generation = moved.state, plan.generation
            self._stepper = self._prepare(plan, seat, moved.state, world, replica, sync)
            self._plan = plan
            self._at("enter.ready")
            clock.lap("ready")
        finally:
            self._watch.phase = "idle"
            self._builder.abandon(left)
        return EnterReport(
            generation=plan.generation,
            seconds=clock.seconds,
            bytes_received=moved.bytes_received,
            bytes_sent=moved.bytes_sent,
            num_groups=sum(group.size > 1 for group in self._groups),
        )

    def step(
        self,
        *,
        before_commit: Callable[[], float | None],
        leave: Callable[[], bool] = lambda: False,
    ) -> StepResult:
        """Run the next step; see `Stepper.run`. Every member of the generation must call it."""
        stepper = self.stepper
        try:
            return stepper.run(before_commit, leave)
        finally:
            self._watch.phase = "idle"

    @property
    def state(self) -> State | None:
        """This rank's state; None before the first `enter`."""
        return self._state

    @property
    def stepper(self) -> Stepper:
        """What runs the steps of the generation entered last.

        Raises:
            PlanError: none was entered.
        """
        if self._stepper is None:
            raise PlanError("no generation entered; call `enter` first")
        return self._stepper

    def standing(self) -> Standing:
        """This rank's word for the vote after an abort."""
        state = self._state
        return Standing(
            gpu=self._gpu,
            generation=self._generation,
            applied_step=state.applied_step if state else 0,
            layout_generation=self._layout_generation,
            synced=bool(state and state.synced),
            grad_norm=state.grad_norm if state else None,
        )

    def work_fraction(self) -> float:
        """This rank's work in a step, in units of a healthy slot's at an even batch split."""
        if self._plan is None or self._stepper is None:
            return 0.0
        replica = self._stepper.replica
        if not replica.num_samples:
            return 0.0
        work = slot_work(
            self._config.model,
            self._config.train.seq_len,
            replica.holders,
            replica.gpus.index(self._gpu),
            num_slots=len(replica.gpus),
        )
        return work * replica.num_samples * len(self._plan.replicas) / self._plan.global_batch

    def save(self, folder: Path) -> Part:
        """Write this rank's part of a checkpoint: the units it is canonical for.

        Raises:
            PlanError: no generation was entered. CheckpointError: it cannot be written.
        """
        if self._plan is None or self._state is None:
            raise PlanError("no generation entered; there is nothing to save")
        rank = self._plan.members().index(self._gpu)
        units = canonical_units(self._config.model, self._plan, rank)
        return write_part(folder, self._gpu, self._state, units)

    def close(self) -> None:
        """Let go of the groups; the state stays readable."""
        self._stepper = None
        self._builder.abandon(self._groups)
        self._groups = []

    def _build_groups(
        self, plan: GenerationPlan, seat: _Seat
    ) -> tuple[Group, Group, dict[int, tuple[SyncGroup, Group]]]:
        """World, replica and sync groups of this rank; the sync group of all ranks is the world."""
        everyone = tuple(range(len(plan.members())))
        slots = tuple(range(seat.first_rank, seat.first_rank + seat.replica.degree))
        mine = [
            group for group in sync_groups(self._config.model, plan) if seat.rank in group.ranks
        ]
        own = [group for group in mine if group.ranks != everyone]
        wanted = [("world", everyone), (f"replica-{seat.replica.replica}", slots)]
        wanted += [(f"sync-{group.index}", group.ranks) for group in own]
        self._groups = self._builder.build(plan, wanted)
        world, replica, *rest = self._groups
        found = {group.index: (group, world) for group in mine}
        found |= {group.index: (group, built) for group, built in zip(own, rest, strict=True)}
        return world, replica, found

    def _agree(self, plan: GenerationPlan, world: Group) -> None:
        """Settle the pending step, then compare plan, configuration, text and steps over the world.

        A rank that cannot go on says so in the comparison, so that all ranks fail alike.
        """
        mine = [_fingerprint(self._config), self._text.checksum, self._settle(plan)]
        rows = world.all_gather(torch.tensor(mine, dtype=torch.int64, device=self._device)).tolist()
        for member, row in zip(plan.members(), rows, strict=True):
            for what, has, wants in zip(
                ("configuration", "text", "applied step"),
                row,
                (*rows[0][:2], plan.applied_step),
                strict=True,
            ):
                if has != wants:
                    raise DigestMismatch(
                        f"generation {plan.generation}: {what} of {member} is {has}, not {wants}"
                    )

    def _settle(self, plan: GenerationPlan) -> int:
        """Apply or drop the pending step as the plan says; returns applied steps, -1 if lost."""
        source = next((s for s in plan.sources if s.gpu == self._gpu), None)
        if source is None:
            self._state, self._layout_generation = None, 0
            return plan.applied_step
        state, roll = self._state, plan.roll_forward
        if state is None:
            return -1
        if held_units(self._config.model, source.holders, source.slot) != state.layout.held:
            return -1
        if roll is not None and state.applied_step == roll.step:
            if not state.synced:
                return -1
            self._at("before_apply")
            apply_step(self._config.train, state, roll.grad_norm)
            self._at("after_apply")
        state.synced = False
        return state.applied_step

    def _move(self, plan: GenerationPlan, moves: MovePlan, seat: _Seat, world: Group) -> Moved:
        fresh = State(
            StateLayout(self._config.model, seat.held),
            applied_step=plan.applied_step,
            device=self._device,
            dtype=self._dtype,
        )
        if plan.roll_forward:
            fresh.grad_norm = plan.roll_forward.grad_norm
        if not plan.sources:
            if plan.checkpoint:
                folder = Path(plan.checkpoint)
                load_units(folder, read_manifest(folder), fresh)
            else:
                fresh.initialise(self._config.model, self._config.train.seed)
            return Moved(fresh, 0, 0)
        return move_state(self._config.model, moves, self._state, fresh, world)

    def _prepare(
        self,
        plan: GenerationPlan,
        seat: _Seat,
        state: State,
        world: Group,
        replica: Group,
        groups: dict[int, tuple[SyncGroup, Group]],
    ) -> Stepper:
        config = self._config
        sync = DirectSync(
            buckets(
                config.model,
                [group for group, _ in groups.values()],
                bucket_elements(config.train.bucket_mb, self._dtype),
            ),
            {index: built for index, (_, built) in groups.items()},
            state,
        )
        slot_model = None
        if seat.replica.mode == "training":
            slot_model = SlotModel(config.model, state, replica, config.train.seq_len)
            slot_model.on_gradient(sync.ready)
        return Stepper(
            train=config.train,
            plan=plan,
            replica=seat.replica,
            rank=seat.rank,
            state=state,
            model=slot_model,
            sync=sync,
            world=world,
            text=self._text,
            watch=self._watch,
            counted=state.layout.spans(canonical_units(config.model, plan, seat.rank)),
            reports_loss=seat.rank == seat.first_rank,
            at=self._at,
        )


class _Laps:
    """Seconds between named points."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now


def _seat(config: Config, plan: GenerationPlan, gpu: str) -> _Seat:
    for first_rank, replica in member_replicas(plan):
        for position, slot in enumerate(replica.live):
            if replica.gpus[slot] == gpu:
                held = held_units(config.model, replica.holders, slot)
                return _Seat(first_rank + position, slot, replica, first_rank, held)
    raise PlanError(f"{gpu} is no member of generation {plan.generation}")


def _fingerprint(config: Config) -> int:
    """What all ranks must agree on; the text's path may differ, its bytes are compared."""
    shared = (config.model, msgspec.structs.replace(config.train, text=""))
    digest = hashlib.blake2b(msgspec.json.encode(shared), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _device(config: Config, gpu: str) -> torch.device:
    if config.cluster.device != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", int(gpu.rpartition("/")[2]) % torch.cuda.device_count())
