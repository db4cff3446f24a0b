"""The engine of one rank: enters generations, runs steps, says where it stands.

The facade the worker drives. It owns this rank's state across generations and everything that
belongs to one generation; it knows no store but the one rendezvous uses, and decides nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.config import Config
from runtime.engine.checkpoint import (
    PartCopy,
    copy_part,
    load_units,
    read_manifest,
    verify_parts,
)
from runtime.engine.data import Text
from runtime.engine.entry import (
    Seat,
    Tools,
    build_groups,
    compare_members,
    find_seat,
    prepare_stepper,
)
from runtime.engine.fail_points import FailPoints, Point
from runtime.engine.group import Group
from runtime.engine.groups import GroupBuilder
from runtime.engine.move import Moved, move_state
from runtime.engine.optimizer import apply_step
from runtime.engine.state import State, StateLayout
from runtime.engine.step import Stepper, StepResult
from runtime.engine.watch import Watch
from runtime.errors import PlanError, UserError
from runtime.layout.move import MovePlan, move_plan
from runtime.layout.sync import canonical_units
from runtime.layout.units import held_units
from runtime.layout.work import slot_work
from runtime.plan.generation import GenerationPlan, Standing

# An abandoned collective frees its thread after this many step deadlines; nothing waits for it.
_TIMEOUT_DEADLINES = 6
_MIN_TIMEOUT_S = 60.0


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


class Engine:
    """One rank's training engine.

    Args:
        gpu: this rank's GPU id (`rack/slot`).
        abort: raised by the worker when the current generation ends; the worker clears it before
            the next `enter`.
        dtype: of parameters, gradients and moments.
        fail_points: where faults are injected, in tests.

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
        self._at: Callable[[Point], None] = fail_points.at if fail_points else lambda _: None
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
        self._tools = Tools(config, self._text, self._watch, self._at)
        self._groups: list[Group] = []
        self._generation = 0
        self._layout_generation = 0
        self._state: State | None = None
        self._plan: GenerationPlan | None = None
        self._stepper: Stepper | None = None

    @property
    def phase(self) -> str:
        """One of compute, collective, commit, move, idle; safe to read from any thread."""
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
            CheckpointError: the checkpoint to begin at cannot be read or trusted.
        """
        model = self._config.model
        seat = find_seat(model, plan, self._gpu)
        moves = move_plan(model, plan)
        # Peers may still be inside the last collective of the generation we leave.
        left, self._groups, self._stepper = self._groups, [], None
        self._generation = plan.generation
        self._watch.phase = "move"
        clock = _Laps()
        try:
            self._at(Point.ENTER_GROUPS)
            groups = build_groups(self._builder, self._config, plan, seat)
            self._groups = list(groups.every)
            clock.lap("groups")
            self._at(Point.ENTER_AGREE)
            applied = self._settle(plan)
            compare_members(self._config, self._text, applied, plan, groups.world)
            clock.lap("agree")
            self._at(Point.ENTER_MOVE)
            moved = self._move(plan, moves, seat, groups.world)
            groups.world.barrier()
            clock.lap("move")
            self._at(Point.BEFORE_SWAP)
            self._state, self._layout_generation = moved.state, plan.generation
            self._stepper = prepare_stepper(self._tools, plan, seat, moved.state, groups)
            self._plan = plan
            self._at(Point.ENTER_READY)
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

    def corrupt(self) -> None:
        """Flip the lowest bit of a parameter: an injected fault that no error tells of."""
        if self._state is not None:
            params = self._state.params
            wide = params.dtype == torch.float64
            params[:1].view(torch.int64 if wide else torch.int32).bitwise_xor_(1)

    def copy_part(self) -> PartCopy:
        """Copy this rank's part of a checkpoint: the units it is canonical for.

        Raises:
            PlanError: no generation was entered.
        """
        if self._plan is None or self._state is None:
            raise PlanError("no generation entered; there is nothing to save")
        rank = self._plan.members().index(self._gpu)
        units = canonical_units(self._config.model, self._plan, rank)
        return copy_part(self._state, units)

    def close(self) -> bool:
        """Let go of the groups; the state stays readable.

        Returns:
            Whether nothing is under way in them: else the engine must be kept, for to destroy a
            group waits for its operations.
        """
        self._stepper = None
        groups, self._groups = self._groups, []
        return self._builder.abandon(groups)

    def _settle(self, plan: GenerationPlan) -> int:
        """Apply or drop the pending step as the plan says; returns applied steps, -1 if lost."""
        brought = plan.layout_of(self._gpu)
        if brought is None:
            self._state, self._layout_generation = None, 0
            return plan.applied_step
        state, roll = self._state, plan.roll_forward
        if state is None:
            return -1
        if held_units(self._config.model, *brought) != state.layout.held:
            return -1
        if roll is not None and state.applied_step == roll.step:
            if not state.synced:
                return -1
            self._at(Point.ROLL_BEFORE_APPLY)
            apply_step(self._config.train, state, roll.grad_norm)
            self._at(Point.ROLL_AFTER_APPLY)
        state.synced = False
        return state.applied_step

    def _move(self, plan: GenerationPlan, moves: MovePlan, seat: Seat, world: Group) -> Moved:
        layout, old = StateLayout(self._config.model, seat.held), self._state
        if plan.sources and old is not None and old.layout.held == layout.held:
            fresh = old  # It only sends; a second state beside the first might not fit.
        else:
            fresh = State(
                layout, applied_step=plan.applied_step, device=self._device, dtype=self._dtype
            )
            fresh.grad_norm = old.grad_norm if old is not None else None
        if not plan.sources:
            if plan.checkpoint:
                folder = Path(plan.checkpoint)
                manifest = read_manifest(folder)
                # It was whole when it was chosen; on this host, and now, it must be so too.
                verify_parts(folder, manifest, world.rank, world.size)
                load_units(folder, manifest, fresh)
            else:
                fresh.initialise(self._config.model, self._config.train.seed)
            return Moved(fresh, 0, 0)
        return move_state(
            self._config.model,
            moves,
            old,
            fresh,
            world,
            posted=lambda: self._at(Point.MOVE_POSTED),
        )


class _Laps:
    """Seconds between named points."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now


def _device(config: Config, gpu: str) -> torch.device:
    if config.cluster.device != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", int(gpu.rpartition("/")[2]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
