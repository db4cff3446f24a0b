"""The life of a run: events in, instructions out, no I/O and no clock of its own.

It owns the generation: it notices that ranks die, hang, come back or that a decision was taken,
lets everybody leave, holds the vote and writes the next plan. What to propose and who may decide is
the desk's (`runtime.control.desk`); what state goes where is `runtime.control.succession`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from runtime.config import Config
from runtime.control import messages as m
from runtime.control.change import Change, Phase
from runtime.control.checkpoints import Checkpoints
from runtime.control.desk import Desk
from runtime.control.examiner import Examiner
from runtime.control.fallback import Fallback
from runtime.control.farewell import Farewell
from runtime.control.fence import Fence
from runtime.control.fleet import Fleet, GpuView
from runtime.control.generations import Generations
from runtime.control.instructions import Finish, Instruction, Order, Outgoing, event_of
from runtime.control.pausing import Pausing
from runtime.control.power_desk import PowerDesk
from runtime.control.progress import Progress
from runtime.control.roll_call import RollCall
from runtime.control.soundness import Soundness
from runtime.control.succession import Aim, StateLost, aims_of, whole_aims
from runtime.errors import PlanError
from runtime.plan.generation import GenerationPlan
from runtime.plan.manifest import Start
from storage.commands import Command
from storage.records import RunState, Severity


class Coordinator:
    """Pure state machine of one run; the controller feeds it and carries out what it says.

    Args:
        config: the run's configuration. run: run id.
        store: (host, port) of the TCPStore for rendezvous.
        now: seconds since the epoch, as in every later call.
        checkpoints: folder of the run's checkpoints; "" writes none.
        start: the checkpoint to go on from.
    """

    def __init__(
        self,
        config: Config,
        *,
        run: str,
        store: tuple[str, int],
        now: float,
        checkpoints: str = "",
        start: Start | None = None,
    ) -> None:
        self.config = config
        self.run = run
        self.fleet = Fleet(config)
        self.outgoing = Outgoing()
        self.progress = Progress(config, run=run, now=now, outgoing=self.outgoing)
        self.aims = whole_aims(config)
        self.desk = Desk(config, run=run, outgoing=self.outgoing)
        self.power = PowerDesk(config, run=run, outgoing=self.outgoing)
        self.progress.power = self.power
        self.progress.spares = self.fleet.spares
        self.examiner = Examiner(config, run=run, outgoing=self.outgoing)
        self.pausing = Pausing()
        self.fallback = Fallback()
        self.soundness = Soundness()
        self.phase: Phase = "starting"
        self.generations = Generations(store)
        self.ended: Finish | None = None
        # Why the generation is being left (while it trains: why it was formed), and was formed.
        self.change = Change(cause="the run started", planned=False, began_at=now)
        self.led_here = self.change
        self._finish: Finish | None = None
        self.last_words = ""
        self._fence = Fence()
        self._farewell = Farewell()
        self.roll_call = RollCall()
        self.checkpoints = Checkpoints(checkpoints, config.checkpoint, now)
        self._held: m.StepDone | None = None
        self._parked: set[str] = set()
        self._entered: set[str] = set()
        self.began_at = now
        self.phase_at = now
        self.start = start or Start()
        self.progress.begin_at(self.start)

    # events ----------------------------------------------------------------------------------

    def handle(self, message: m.FromAgent, now: float) -> list[Instruction]:
        """Take one message of an agent or worker."""
        if isinstance(message, m.AgentHello):
            self.roll_call.hello(self, message, now)
        elif isinstance(message, m.CapsSet | m.CapsReturned):
            self._on_caps(message, now)
        elif isinstance(message, m.Observed | m.SourceChanged):
            self.examiner.heard(self, message, now)
        elif message.gpu not in self.fleet:
            self.event("unknown_gpu", "warning", f"a message came from {message.gpu}", now)
        elif isinstance(message, m.WorkerReady):
            self.roll_call.ready(self, message, now)
        elif isinstance(message, m.WorkerExited):
            self.roll_call.exited(self, message, now)
        elif isinstance(message, m.Parked):
            self._on_parked(message, now)
        elif isinstance(message, m.Entered):
            self._on_entered(message, now)
        elif isinstance(message, m.Copied | m.Saved | m.CheckpointRefused):
            self.checkpoints.heard(self, message, now)
        elif isinstance(message, m.StepDone | m.StepRefused):
            self._on_step(message, now)
        elif isinstance(message, m.Pulse):
            view = self.fleet[message.gpu]
            view.pulse_at, view.phase, view.phase_age_s = now, message.phase, message.phase_age_s
        else:
            self.fleet[message.gpu].said = message.reason
            self.event(
                "worker_failed", "critical", f"{message.gpu}: {message.reason}", now, message.gpu
            )
        return self.outgoing.take()

    def tick(self, now: float) -> list[Instruction]:
        """Look at deadlines; call a few times a second."""
        if self.phase != "ended":
            if self.phase == "starting" and self.number == 0:
                self.roll_call.start_when_ready(self, now)
            self.pausing.tick(self, now)
            self.fallback.tick(self, now)
            self.checkpoints.tick(self, now)
            self._fence.look(self, now)
            self.examiner.tick(self, now)
            self.desk.tick(self, now)
        else:
            self._farewell.look(self, now)
        return self.outgoing.take()

    def command(self, command: Command, now: float) -> list[Instruction]:
        """Carry out a person's command; the answer is among the instructions."""
        self.desk.intake.take(self, command, now)
        return self.outgoing.take()

    def snapshot(self, now: float) -> RunState:
        """The run as the dashboard shows it."""
        return self.progress.snapshot(self, now)

    # what the desk may ask for ---------------------------------------------------------------

    def change_shape(
        self,
        aims: Sequence[Aim],
        *,
        cause: str,
        proposal: str,
        now: float,
        step_s: float = math.inf,
        restart: bool = False,
    ) -> None:
        """Go to the shape `aims`, whose step is predicted to take `step_s`, at a step boundary.

        restart: all processes are replaced and begin at a checkpoint of that boundary.
        The next boundary, as a rule. The last one, when the step at hand would still take longer
        than a whole step of the new shape: running it again there is done sooner.
        """
        progress = self.progress
        left_s = progress.expected_step_s - (now - progress.last_commit_at)
        at_once = self.phase == "training" and progress.formed and left_s > step_s
        self.aims = list(aims)
        self.leave(
            Change(
                cause=cause,
                planned=True,
                at_once=at_once and not restart,
                began_at=now,
                proposal=proposal,
                restart=restart,
            ),
            now,
        )

    def finish(self, status: Literal["stopped", "failed"], reason: str, now: float) -> None:
        """End the run at the next step boundary; a failure on the way is got over first."""
        finish = Finish(status=status, reason=reason)
        if self.phase in ("starting", "ended"):
            self.end(finish, now)
        elif self._finish is None:
            self._finish = finish
            if self.phase == "paused":
                self.pausing.lift(self, reason, now)
            elif self.phase != "restoring":
                self.pausing.why = ""
                self.leave(Change(cause=reason, planned=True, began_at=now), now)

    def start_again(self, start: Start, change: Change) -> None:
        """Forget what the ranks hold: the next generation begins at `start`, everybody empty."""
        self.start, self.change, self.led_here = start, change, change
        self.generations.forget()
        self.progress.roll_back(start)

    def call_off(self, why: str, now: float) -> None:
        """The approved change cannot be: go on as the run stands."""
        self.desk.book.interrupted(self.change.proposal, why)
        self.change = replace(self.change, proposal="", restart=False)
        assert self.plan is not None
        self.aims = aims_of(self.plan)
        self.form_next(now)

    def end_as_asked(self, now: float) -> None:
        """End the run as `finish` was told, if it was."""
        if self._finish is not None:
            self.end(self._finish, now)

    def end_now(self, reason: str, now: float) -> None:
        """End the run where it stands, without a last checkpoint."""
        self.end(Finish(status="stopped", reason=reason), now)

    def order(self, message: m.ToAgent, host: str | None = None) -> None:
        self.outgoing.put(Order(message=message, host=host))

    @property
    def number(self) -> int:
        return self.generations.number

    @property
    def plan(self) -> GenerationPlan | None:
        return self.generations.plan

    @property
    def store(self) -> tuple[str, int]:
        return self.generations.store

    @property
    def takes_decisions(self) -> bool:
        """Whether the generation stands, so that a proposal for it can be answered."""
        return self.phase in ("entering", "training") and self._finish is None

    @property
    def is_finishing(self) -> bool:
        return self._finish is not None

    @property
    def parked(self) -> frozenset[str]:
        """Ranks that have left the present generation."""
        return frozenset(self._parked)

    def note_start(self, reason: str, now: float) -> None:
        """Put where the run begins, and why, into the journal."""
        kind = "run_continued" if self.start.checkpoint else "run_begun_afresh"
        self.event(kind, "info", reason, now)

    def _on_caps(self, message: m.CapsSet | m.CapsReturned, now: float) -> None:
        if isinstance(message, m.CapsSet):
            self.power.caps_set(self, message, now)
        else:
            self._farewell.returned(self, message, now)

    # workers ---------------------------------------------------------------------------------

    def host_lost(self, host: str, now: float) -> list[Instruction]:
        """An agent stayed away past its deadline: its GPUs are gone for this run."""
        self.roll_call.host_lost(self, host, now)
        return self.outgoing.take()

    def lose(self, gpu: str, happened_at: float, now: float, why: str) -> None:
        """A GPU's worker is gone: the generation it was a member of is over."""
        view = self.fleet[gpu]
        if view.status == "dead" or self.phase == "ended":
            return
        self.fleet.exited(gpu, now)
        self.last_words = f"{gpu} failed: {why}"
        if self.fleet.is_spare(gpu) and not self._is_member(gpu):
            self.event("spare_failed", "warning", f"spare {self.last_words}", now, gpu)
        else:
            self.event("gpu_failed", "critical", self.last_words, now, gpu)
        self.examiner.worker_lost(self, gpu, why, now)
        self.desk.note(view.replica, happened_at, f"{gpu} failed: {why}")
        if self.phase in ("entering", "training", "leaving") and self._is_member(gpu):
            self.progress.failure(happened_at, now)
            self.leave(Change(cause=f"{gpu} failed", planned=False, began_at=happened_at), now)
        elif self.phase == "saving":
            self.checkpoints.last.seal_when_complete(self, now)
        else:
            self.desk.refresh(self, now)

    def _is_member(self, gpu: str) -> bool:
        return self.plan is not None and gpu in self.plan.members()

    # leaving ---------------------------------------------------------------------------------

    def leave(self, change: Change, now: float) -> None:
        """Let every rank leave the current generation; a failure overrides a planned change."""
        assert self.plan is not None
        leaving, before = self.phase == "leaving", self.change
        if leaving and before.aborts:
            # All are on their way out already; what began it stays the beginning.
            planned = change.planned and before.planned
            began_at = min(change.began_at, before.began_at)
            change = replace(change, planned=planned, at_once=True, began_at=began_at)
        if leaving and before.proposal and before.proposal != change.proposal:
            self.desk.book.interrupted(before.proposal, change.cause)
        self.change = change
        if not change.planned and (not leaving or before.planned):
            self.event(
                "generation_aborted",
                "warning",
                f"generation {self.number} ended: {change.cause}",
                now,
            )
        self.set_phase("leaving", now)
        self.desk.book.lapse(f"generation {self.number} ended: {change.cause}")
        self.order(m.LeaveGeneration(generation=self.number, abort=change.aborts))
        self._form_when_parked(now)

    def _on_parked(self, parked: m.Parked, now: float) -> None:
        view = self.fleet[parked.gpu]
        if view.status != "alive" or parked.generation != self.number:
            return
        view.standing, view.pulse_at = parked.standing, now
        self._parked.add(parked.gpu)
        if parked.last is not None and parked.last.step == self.progress.committed:
            self._on_step(parked.last, now)
        elif parked.last is not None and parked.last.step > self.progress.committed:
            # The steps before it may yet be told: whoever told them is cut off, not gone.
            self._held = parked.last
        all_done = 0 < self.config.train.steps <= parked.standing.applied_step
        if self.phase == "leaving":
            self._form_when_parked(now)
        elif self.phase in ("entering", "training") and self._is_member(view.gpu) and not all_done:
            # It lost a peer before we did.
            self.retry_generation(f"{parked.gpu} left it by itself", now)

    def _form_when_parked(self, now: float) -> None:
        assert self.plan is not None
        if not {view.gpu for view in self.living_members()} <= self._parked:
            return
        if self._held is not None:
            held, self._held = self._held, None
            self._on_step(held, now)
        if self.change.planned:
            left_at = self.progress.last_commit_at
            self.change = replace(self.change, began_at=max(self.change.began_at, left_at))
            self.progress.leaving(left_at)
        # Ranks that left in the middle of a step may be one apart: the next generation mends that.
        if self._finish is not None and (not self.change.aborts or self._all_steps_done()):
            self.checkpoints.last.begin(self, self._finish, now)
        elif self.pausing.why:
            self.pausing.begin(self, now)
        elif self.change.restart and not self.change.aborts:
            self.checkpoints.last.begin(self, None, now)
        else:
            self.form_next(now)

    def form_next(self, now: float) -> None:
        """Write and publish the next generation's plan, or end the run if there can be none."""
        unformed = "" if self.progress.formed else self.led_here.proposal
        if self.change.proposal and not self.desk.can_go_to(self, self.aims):
            self.desk.book.interrupted(self.change.proposal, "a GPU it needs has failed")
            self.change = replace(self.change, proposal="")
        elif self.progress.formed and not self.change.planned and self._finish is None:
            at_once = self.desk.reshape_at_once(self, now)
            if at_once is not None:
                self.aims, proposal = at_once
                self.change = replace(self.change, proposal=proposal.id)
        try:
            self.aims = self.desk.fit_aims(self, now)
            plan, bytes_moved = self.generations.publish_next(self, self.aims)
        except PlanError as error:
            lost = isinstance(error, StateLost)
            reason = f"state lost: {error}" if lost else f"{error}: {self.last_words}"
            if self._finish is not None:
                self.end(Finish(status="failed", reason=reason), now)
            else:
                self.fallback.begin(self, reason, now, lost=lost)
            return
        if unformed and self.desk.book.is_carried_out_by(unformed, plan):
            # A failure elsewhere: what was approved is part of this generation instead.
            self.change = replace(self.change, proposal=unformed)
        elif unformed:
            self.desk.book.interrupted(unformed, self.change.cause)
        self.led_here = self.change
        self._parked, self._entered = set(), set()
        self.set_phase("entering", now)
        self.power.generation_published(self, plan)
        self.examiner.generation_published(plan)
        self.order(m.EnterGeneration(plan=plan))
        self.progress.generation_published(plan, bytes_moved, now)
        if self._finish is not None:
            self.leave(Change(cause=self._finish.reason, planned=True, began_at=now), now)
        self.desk.refresh(self, now)

    def living_members(self) -> list[GpuView]:
        """Members of the generation whose workers live."""
        assert self.plan is not None
        views = [self.fleet[gpu] for gpu in self.plan.members()]
        return [view for view in views if view.status == "alive"]

    # training --------------------------------------------------------------------------------

    def _on_entered(self, entered: m.Entered, now: float) -> None:
        if entered.generation != self.number or self.phase != "entering":
            return
        self._entered.add(entered.gpu)
        assert self.plan is not None
        if self._entered >= set(self.plan.members()):
            self.set_phase("training", now)

    def _on_step(self, done: m.StepDone | m.StepRefused, now: float) -> None:
        plan = self.plan
        if isinstance(done, m.StepRefused):
            self.soundness.refused(self, done, now)
            return
        # What is told of an earlier generation now, the vote that ended it has settled already.
        over = self.phase == "ended" or done.step < self.progress.committed
        if plan is None or over or done.generation != self.number:
            return
        if done.step > self.progress.committed:
            untold = f"steps {self.progress.committed} to {done.step - 1} were never told"
            self.event("steps_untold", "warning", untold, now)
        first = self.progress.step_committed(plan, done, self.led_here, waiting=self._waiting())
        self.soundness.look(self, plan, done, now)
        if first:
            self.soundness.formed(self, now)
            self.desk.formed(self, done.at)
            self.desk.refresh(self, now)
            self.desk.followup.changed(self.led_here, done, first=self.number == 1)
        self.desk.step_committed(self, done)
        self.power.step_committed(self, plan, done, now)
        if done.generation == self.number:
            self.examiner.step_committed(self, plan, done, now)
        if self._all_steps_done() and self._finish is None:
            reason = f"all {self.config.train.steps} steps are done"
            self._finish = Finish(status="stopped", reason=reason)
            if self.phase != "leaving":
                self.set_phase("leaving", now)
                self.change = Change(cause=reason, planned=True, began_at=now)
                self.desk.book.lapse(reason)
                self._form_when_parked(now)

    def _all_steps_done(self) -> bool:
        return 0 < self.config.train.steps <= self.progress.committed

    def _waiting(self) -> bool:
        """Whether a replica is left out only because its proposal is not decided yet."""
        return self.desk.book.has_open_for_lost_slots()

    # what the fence may do -------------------------------------------------------------------

    def stop_rank(self, gpu: str, why: str, now: float) -> None:
        """Have the agent kill a rank's process; its end then is a failure like any other."""
        self.event("rank_fenced", "critical", why, now, gpu)
        self.roll_call.kill(self, gpu, self.fleet[gpu].pid)

    def give_up_rank(self, gpu: str, why: str, now: float) -> None:
        """Go on without a rank whose process cannot be stopped: nobody will meet it again."""
        self.roll_call.give_up(self, gpu)
        self.lose(gpu, now, now, why)

    def retry_generation(self, why: str, now: float) -> None:
        """Leave the generation although nobody has failed, and form the next."""
        cause = f"generation {self.number} is formed anew: {why}"
        self.progress.failure(now, now)
        self.leave(Change(cause=cause, planned=False, began_at=now), now)

    def tell_stalled(self, why: str, now: float) -> None:
        self.event("run_stalled", "critical", why, now)

    # the end ---------------------------------------------------------------------------------

    def end(self, finish: Finish, now: float) -> None:
        """The run is over, whatever it was doing."""
        if self.ended is not None:
            return
        self.ended = finish
        self.set_phase("ended", now)
        self.desk.book.close_all(finish.reason)
        self._farewell.begin(self, finish, now)

    def set_phase(self, phase: Phase, now: float) -> None:
        self.phase, self.phase_at = phase, now

    def event(
        self,
        kind: str,
        severity: Severity,
        message: str,
        now: float,
        gpu: str | None = None,
        **more: dict[str, object],
    ) -> None:
        """Record an event; `details`, if any, are its own."""
        view = self.fleet[gpu] if gpu is not None else None
        record = event_of(self.run, self.number, kind, severity, message, now, view=view, **more)
        self.outgoing.put(record)
