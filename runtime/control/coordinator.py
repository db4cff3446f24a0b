"""The life of a run: events in, instructions out, no I/O and no clock of its own.

It owns the generation: it notices that ranks die, hang, come back or that a decision was taken,
lets everybody leave, holds the vote and writes the next plan. What to propose and who may decide is
the desk's (`runtime.control.desk`); what state goes where is `runtime.control.succession`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from runtime.config import Config
from runtime.control import messages as m
from runtime.control.desk import Desk
from runtime.control.fleet import Fleet
from runtime.control.instructions import Finish, Instruction, Order, Outgoing, Record, Seal
from runtime.control.progress import Progress
from runtime.control.succession import Aim, Past, StateLost, succeed
from runtime.errors import PlanError
from runtime.plan.generation import GenerationPlan
from runtime.plan.manifest import Manifest, Part, Start
from storage.records import Command, EventHappened, RunState, Severity

Phase = Literal["starting", "entering", "training", "leaving", "saving", "ended"]
KEPT_PLANS = 16
SAVE_DEADLINE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """Why a generation is being left. proposal: id of the proposal that is being applied."""

    cause: str
    planned: bool
    began_at: float
    proposal: str = ""
    finish: Finish | None = None


class Coordinator:
    """Pure state machine of one run; the controller feeds it and carries out what it says.

    Args:
        config: the run's configuration. run: run id.
        store: (host, port) of the TCPStore for rendezvous.
        now: seconds since the epoch, as in every later call.
        checkpoints: folder for the checkpoint at the end; "" writes none.
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
        self.aims = [self._whole(replica) for replica in range(len(config.cluster.racks))]
        self.desk = Desk(config, run=run, outgoing=self.outgoing)
        self.phase: Phase = "starting"
        self.plan: GenerationPlan | None = None
        self.ended: Finish | None = None
        self._store = store
        self._number = 0
        self._history: dict[int, GenerationPlan] = {}
        self._change = Change(cause="the run started", planned=False, began_at=now)
        self._parked: set[str] = set()
        self._entered: set[str] = set()
        self._began_at = now
        self._phase_at = now
        self._checkpoints = checkpoints
        self._folder = ""
        self._parts: dict[str, Part] = {}
        self._start = start or Start()
        self.progress.begin_at(self._start)

    # events ----------------------------------------------------------------------------------

    def handle(self, message: m.FromAgent, now: float) -> list[Instruction]:
        """Take one message of an agent or worker."""
        if isinstance(message, m.AgentHello):
            self._on_hello(message, now)
        elif message.gpu not in self.fleet:
            self._event("unknown_gpu", "warning", f"a message came from {message.gpu}", now)
        elif isinstance(message, m.WorkerReady):
            self._on_ready(message, now)
        elif isinstance(message, m.WorkerExited):
            self._on_exit(message, now)
        elif isinstance(message, m.Parked):
            self._on_parked(message, now)
        elif isinstance(message, m.Entered):
            self._on_entered(message, now)
        elif isinstance(message, m.Saved):
            self._on_saved(message, now)
        elif isinstance(message, m.StepDone):
            self._on_step(message, now)
        elif isinstance(message, m.Pulse):
            view = self.fleet[message.gpu]
            view.pulse_at, view.phase, view.phase_age_s = now, message.phase, message.phase_age_s
        else:
            self._event(
                "worker_failed", "critical", f"{message.gpu}: {message.reason}", now, message.gpu
            )
        return self.outgoing.take()

    def tick(self, now: float) -> list[Instruction]:
        """Look at deadlines; call a few times a second."""
        if self.phase != "ended":
            if self.phase == "starting" and self._number == 0:
                self._start_when_ready(now)
            self._fence(now)
            self.desk.tick(self, now)
        return self.outgoing.take()

    def command(self, command: Command, now: float) -> list[Instruction]:
        """Carry out a person's command; the answer is among the instructions."""
        self.desk.command(self, command, now)
        return self.outgoing.take()

    def snapshot(self, now: float) -> RunState:
        """The run as the dashboard shows it."""
        return self.progress.snapshot(self, now)

    # what the desk may ask for ---------------------------------------------------------------

    def change_shape(self, aims: Sequence[Aim], *, cause: str, proposal: str, now: float) -> None:
        """Go to the shape `aims` at the next step boundary."""
        self.aims = list(aims)
        self._leave(Change(cause=cause, planned=True, began_at=now, proposal=proposal), now)

    def finish(self, status: Literal["stopped", "failed"], reason: str, now: float) -> None:
        """End the run at the next step boundary."""
        finish = Finish(status=status, reason=reason)
        if self.phase in ("starting", "ended"):
            self._end(finish, now)
        else:
            self._leave(Change(cause=reason, planned=True, began_at=now, finish=finish), now)

    def order(self, message: m.ToAgent, host: str | None = None) -> None:
        self.outgoing.put(Order(message=message, host=host))

    @property
    def number(self) -> int:
        return self._number

    @property
    def change(self) -> Change:
        return self._change

    def note_start(self, reason: str, now: float) -> None:
        """Put where the run begins, and why, into the journal."""
        kind = "run_continued" if self._start.checkpoint else "run_begun_afresh"
        self._event(kind, "info", reason, now)

    # workers ---------------------------------------------------------------------------------

    def _on_hello(self, hello: m.AgentHello, now: float) -> None:
        """A (re)connected agent: start what never ran; take note of what died unseen."""
        missing = []
        for view in self.fleet:
            if view.host != hello.host:
                continue
            pid = hello.workers.get(view.gpu)
            if pid is None and view.status == "absent" and self.phase == "starting":
                missing.append(view.gpu)
                view.status, view.since = "starting", now
            elif pid is None and view.status == "alive":
                self._lose(view.gpu, now, now, "its process is gone")
        if missing:
            self.order(m.StartWorkers(gpus=tuple(missing)), hello.host)

    def host_lost(self, host: str, now: float) -> list[Instruction]:
        """An agent stayed away past its deadline: its GPUs are gone for this run."""
        for view in self.fleet:
            if view.host == host and view.status in ("alive", "starting"):
                self._lose(view.gpu, now, now, f"agent {host} is gone")
        return self.outgoing.take()

    def _on_ready(self, ready: m.WorkerReady, now: float) -> None:
        view = self.fleet[ready.gpu]
        if view.pid == ready.pid:
            return
        self.fleet.started(ready.gpu, ready.pid, now)
        if self.phase == "starting":
            self._start_when_ready(now)
            return
        self._event("gpu_repaired", "info", f"{ready.gpu} is back", now, ready.gpu)
        self.desk.note(view.replica, now, f"{ready.gpu} is back")
        self.desk.refresh(self, now)

    def _on_exit(self, exited: m.WorkerExited, now: float) -> None:
        view = self.fleet[exited.gpu]
        unseen = view.status == "starting"
        if (exited.pid != view.pid and not unseen) or self.phase == "ended":
            return
        how = f"signal {-exited.code}" if exited.code < 0 else f"exit code {exited.code}"
        self._lose(exited.gpu, min(exited.at, now), now, f"its worker ended by {how}")

    def _lose(self, gpu: str, happened_at: float, now: float, why: str) -> None:
        view = self.fleet[gpu]
        if view.status == "dead":
            return
        self.fleet.exited(gpu, now)
        self._event("gpu_failed", "critical", f"{gpu} failed: {why}", now, gpu)
        self.desk.note(view.replica, happened_at, f"{gpu} failed: {why}")
        if self.phase in ("entering", "training", "leaving") and self._is_member(gpu):
            self.progress.failure(happened_at, now)
            self._leave(Change(cause=f"{gpu} failed", planned=False, began_at=happened_at), now)
        elif self.phase in ("entering", "training"):
            self.desk.refresh(self, now)

    def _is_member(self, gpu: str) -> bool:
        return self.plan is not None and gpu in self.plan.members()

    # starting --------------------------------------------------------------------------------

    def _start_when_ready(self, now: float) -> None:
        """Form the first generation when every worker is up, or those that are at the deadline."""
        late = now - self._began_at > self.config.control.join_deadline_s
        alive = [view for view in self.fleet if view.status == "alive"]
        if len(alive) == len(list(self.fleet)) or (late and alive):
            for view in self.fleet:
                if view.status != "alive":
                    self._lose(view.gpu, now, now, "it did not come up in time")
            self._form_next(now)

    # leaving ---------------------------------------------------------------------------------

    def _leave(self, change: Change, now: float) -> None:
        """Let every rank leave the current generation; a failure overrides a planned change."""
        assert self.plan is not None
        if self.phase == "leaving" and change.planned:
            change = replace(change, planned=self._change.planned)
        if self._change.proposal and self._change.proposal != change.proposal:
            self.desk.interrupted(self._change.proposal, change.cause, now)
        self._change = change
        if not change.planned:
            self._event(
                "generation_aborted",
                "warning",
                f"generation {self._number} ended: {change.cause}",
                now,
            )
        self._set_phase("leaving", now)
        self.order(m.LeaveGeneration(generation=self._number, abort=not change.planned))
        self._form_when_parked(now)

    def _on_parked(self, parked: m.Parked, now: float) -> None:
        view = self.fleet[parked.gpu]
        if view.status != "alive" or parked.generation != self._number:
            return
        view.standing, view.pulse_at = parked.standing, now
        self._parked.add(parked.gpu)
        if parked.last is not None:
            self._on_step(parked.last, now)
        if self.phase == "leaving":
            self._form_when_parked(now)

    def _form_when_parked(self, now: float) -> None:
        assert self.plan is not None
        waiting = {
            gpu for gpu in self.plan.members() if self.fleet[gpu].status == "alive"
        } - self._parked
        if waiting:
            return
        if self._change.planned:
            self.progress.leaving(self.progress.last_commit_at)
        if self._change.finish is not None:
            self._save(now)
        else:
            self._form_next(now)

    def _form_next(self, now: float) -> None:
        """Write and publish the next generation's plan, or end the run if there can be none."""
        try:
            self.aims = self.desk.fit_aims(self, now)
            plan, bytes_moved = succeed(
                self.config,
                run=self.run,
                number=self._number + 1,
                store=self._store,
                past=Past(
                    history=self._history,
                    previous=self.plan,
                    standings={v.gpu: v.standing for v in self.fleet if v.standing is not None},
                    committed_steps=self.progress.committed,
                    start=self._start,
                ),
                aims=self.aims,
                planned=self._change.planned,
            )
        except StateLost as error:
            self._end(Finish(status="failed", reason=f"state lost: {error}"), now)
            return
        except PlanError as error:
            self._end(Finish(status="failed", reason=str(error)), now)
            return
        self._number = plan.generation
        self.plan = plan
        self._history[plan.generation] = plan
        for old in sorted(self._history)[:-KEPT_PLANS]:
            del self._history[old]
        self._parked, self._entered = set(), set()
        self._set_phase("entering", now)
        self.order(m.SetDevice(caps_w=_caps(plan)))
        self.order(m.EnterGeneration(plan=plan))
        self.progress.generation_published(plan, bytes_moved, now)
        self.desk.refresh(self, now)

    # the last checkpoint ---------------------------------------------------------------------

    def _save(self, now: float) -> None:
        """Let every rank write its part of a checkpoint before the run ends."""
        assert self._change.finish is not None
        if not self._checkpoints or self.progress.committed == self.progress.start_step:
            self._end(self._change.finish, now)
            return
        self._parts = {}
        self._folder = f"{self._checkpoints}/step-{self.progress.committed:08d}"
        self._set_phase("saving", now)
        self.order(m.Save(folder=self._folder))

    def _on_saved(self, saved: m.Saved, now: float) -> None:
        if self.phase != "saving" or self.plan is None or self._change.finish is None:
            return
        if saved.part is None:
            self._event("checkpoint_failed", "critical", f"{saved.gpu}: {saved.error}", now)
            self._end(self._change.finish, now)
            return
        self._parts[saved.gpu] = saved.part
        members = self.plan.members()
        if set(members) <= set(self._parts):
            self.progress.ledger.spend("checkpointing", now)
            self.outgoing.put(
                Seal(
                    folder=self._folder,
                    manifest=Manifest(
                        run=self.run,
                        applied_step=self.progress.committed,
                        model=self.config.model,
                        train=self.config.train,
                        parts=tuple(self._parts[gpu] for gpu in members),
                    ),
                )
            )
            self._end(self._change.finish, now)

    # training --------------------------------------------------------------------------------

    def _on_entered(self, entered: m.Entered, now: float) -> None:
        if entered.generation != self._number or self.phase != "entering":
            return
        self._entered.add(entered.gpu)
        self.progress.entered(entered)
        assert self.plan is not None
        if self._entered >= set(self.plan.members()):
            self._set_phase("training", now)

    def _on_step(self, done: m.StepDone, now: float) -> None:
        plan = self._history.get(done.generation)
        if plan is None or self.phase == "ended" or done.step < self.progress.committed:
            return
        first = self.progress.step_committed(plan, done, self._change, waiting=self._waiting())
        if done.states_agree is False:
            self._event("states_differ", "critical", f"replicas differ after step {done.step}", now)
        if first:
            self.desk.formed(self, done.at)
            if self._change.planned:
                self.desk.followup.changed(max(0.0, done.at - done.step_s - self._change.began_at))
        self.desk.step_committed(self, done)
        steps = self.config.train.steps
        if steps and done.step + 1 >= steps and self.phase != "leaving":
            self._set_phase("leaving", now)
            self._change = Change(
                cause="all steps done",
                planned=True,
                began_at=now,
                finish=Finish(status="stopped", reason=f"all {steps} steps are done"),
            )
            self._form_when_parked(now)

    def _waiting(self) -> bool:
        """Whether a replica is left out only because its proposal is not decided yet."""
        return self.desk.has_open_for_lost_slots()

    # deadlines -------------------------------------------------------------------------------

    def _fence(self, now: float) -> None:
        """Kill ranks that hold the others up: silent, or busy for ever while the rest waits."""
        if self.phase == "saving" and now - self._phase_at > SAVE_DEADLINE_S:
            self._event("checkpoint_failed", "critical", "not every rank wrote its part", now)
            assert self._change.finish is not None
            self._end(self._change.finish, now)
        if self.phase not in ("entering", "training", "leaving") or self.plan is None:
            return
        deadline = self.step_deadline_s()
        if self.phase == "leaving" and not self._change.planned:
            deadline = min(deadline, 3.0)
        if now - max(self._phase_at, self.progress.last_commit_at) < deadline:
            return
        members = [self.fleet[gpu] for gpu in self.plan.members()]
        late = [v for v in members if v.status == "alive" and v.gpu not in self._parked]
        silent = [v for v in late if now - v.pulse_at > min(deadline, 2.0)]
        stuck = [
            v for v in late if v.phase not in ("collective", "commit") and v.phase_age_s > deadline
        ]
        for view in silent or stuck:
            self._event(
                "rank_fenced",
                "critical",
                f"{view.gpu} made no progress for {deadline:.1f} s and was stopped",
                now,
                view.gpu,
            )
            self.order(m.KillWorker(gpu=view.gpu), view.host)
        self._phase_at = now

    def step_deadline_s(self) -> float:
        """Longest time without a commit before the cause is looked for: 3 steps, at least 2 s."""
        expected = self.progress.expected_step_s
        if expected <= 0 or not self.progress.formed:
            return self.config.control.step_deadline_s
        return min(self.config.control.step_deadline_s, max(2.0, 3.0 * expected))

    # the end ---------------------------------------------------------------------------------

    def _end(self, finish: Finish, now: float) -> None:
        if self.ended is not None:
            return
        self.ended = finish
        self._set_phase("ended", now)
        self.desk.close_all(finish.reason, now)
        self.progress.ended(finish, now)
        self.order(m.Quit())
        self.outgoing.put(finish)

    def _set_phase(self, phase: Phase, now: float) -> None:
        self.phase, self._phase_at = phase, now

    def _event(
        self, kind: str, severity: Severity, message: str, now: float, gpu: str | None = None
    ) -> None:
        view = self.fleet[gpu] if gpu is not None else None
        self.outgoing.put(
            Record(
                entry=EventHappened(
                    seq=0,
                    at=now,
                    run=self.run,
                    kind=kind,
                    severity=severity,
                    message=message,
                    generation=self._number,
                    replica=view.replica if view else None,
                    rack=gpu.partition("/")[0] if gpu else None,
                    gpu=gpu,
                )
            )
        )

    def _whole(self, replica: int) -> Aim:
        rack = self.config.cluster.racks[replica]
        return Aim(
            replica=replica,
            mode="training",
            live=tuple(range(rack.gpus)),
            num_samples=0,
            caps_w=(self.config.emulated.normal_cap_w,) * rack.gpus,
        )


def _caps(plan: GenerationPlan) -> dict[str, float]:
    return {
        gpu: cap
        for replica in plan.replicas
        for gpu, cap in zip(replica.gpus, replica.caps_w, strict=True)
        if cap > 0
    }
