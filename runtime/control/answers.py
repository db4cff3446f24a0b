"""What becomes of people's commands: checked where they are carried out, answered with a reason.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from runtime.control import messages as m
from runtime.control.instructions import Outgoing, Record
from runtime.errors import PlanError
from runtime.plan.planner import compare
from storage.records import (
    Command,
    CommandResult,
    Decide,
    DecisionMade,
    EventHappened,
    Fault,
    Pause,
    Report,
    Resume,
    SetBudget,
    Stop,
    Trigger,
)

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator
    from runtime.control.desk import Desk


class _Refused(Exception):
    """Not done; `code` as in CommandResult."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def answer_command(
    desk: Desk, coordinator: Coordinator, command: Command, now: float, outgoing: Outgoing
) -> CommandResult:
    """Carry out one command; returns its answer."""
    try:
        if coordinator.ended is not None:
            raise _Refused("invalid", f"the run is over: {coordinator.ended.reason}")
        if isinstance(command, Decide):
            message = _decide(desk, coordinator, command, now)
        elif isinstance(command, Trigger):
            message = _trigger(desk, coordinator, command, now)
        elif isinstance(command, Fault):
            message = _fault(coordinator, command, now, outgoing)
        elif isinstance(command, Report):
            message = _report(coordinator, command, now)
        elif isinstance(command, SetBudget):
            message = _set_budget(coordinator, command, now)
        elif isinstance(command, Pause | Resume):
            message = _pause_or_resume(coordinator, command, now)
        elif not isinstance(command, Stop):
            raise _Refused("invalid", "this controller does not know such a command")
        else:
            coordinator.finish("stopped", command.reason or f"stopped by {command.who}", now)
            message = "the run ends at the next step boundary"
    except _Refused as refused:
        return CommandResult(
            id=command.id, at=now, ok=False, code=refused.code, message=str(refused)
        )
    return CommandResult(id=command.id, at=now, ok=True, code="done", message=message)


def _decide(desk: Desk, coordinator: Coordinator, command: Decide, now: float) -> str:
    proposal = desk.book.get(command.proposal)
    if proposal is None:
        raise _Refused("unknown", f"there is no proposal {command.proposal} in this run")
    if proposal.state != "open":
        # The live store may have taken the answer before it heard that the proposal had lapsed.
        desk.book.bump(proposal, max(proposal.revision, command.revision + 1))
        code = "stale" if proposal.state == "stale" else "decided"
        code = "expired" if proposal.state == "expired" else code
        raise _Refused(code, f"proposal {proposal.id} is {proposal.state}: {proposal.state_reason}")
    numbers = {command.generation, proposal.generation, coordinator.number}
    if len(numbers) > 1 or not coordinator.takes_decisions:
        desk.book.bump(proposal, max(proposal.revision, command.revision + 1))
        raise _Refused(
            "stale",
            f"proposal {proposal.id} was computed for generation {command.generation}; "
            f"the run is in generation {coordinator.number}",
        )
    overrides = command.verdict == "approved" and command.option not in (
        None,
        proposal.recommended,
    )
    if (command.verdict == "rejected" or overrides) and not command.reason.strip():
        desk.book.bump(proposal, max(proposal.revision, command.revision + 1))
        what = "choosing another than the recommended option" if overrides else "rejecting"
        raise _Refused("invalid", f"{what} needs a reason")
    if command.verdict == "approved":
        option = command.option if command.option is not None else proposal.recommended
        if not 0 <= option < len(proposal.options):
            desk.book.bump(proposal, command.revision + 1)
            raise _Refused("invalid", f"option {option} does not exist")
        picked = proposal.options[option]
        if not picked.feasible:
            desk.book.bump(proposal, command.revision + 1)
            raise _Refused("invalid", f"{picked.title} is not possible: {picked.reason}")
    else:
        option = None
    decision = DecisionMade(
        seq=0,
        at=now,
        run=proposal.run,
        id=command.id,
        proposal=proposal.id,
        generation=proposal.generation,
        verdict=command.verdict,
        option=option,
        who=command.who,
        via=command.via,
        reason=command.reason,
    )
    # The live store counted the answer as a revision of its own; without one it is ours to count.
    revision = max(proposal.revision, command.revision) + 1
    try:
        desk.decide(coordinator, proposal, decision, revision=revision)
    except PlanError as error:
        desk.book.bump(proposal, revision)
        raise _Refused("stale", str(error)) from error
    return f"proposal {proposal.id} {command.verdict} by {command.who}"


def _trigger(desk: Desk, coordinator: Coordinator, command: Trigger, now: float) -> str:
    if coordinator.plan is None:
        raise _Refused("invalid", "the run is still starting")
    if coordinator.phase == "paused":
        raise _Refused("invalid", f"the run is {coordinator.pausing.why}; resume it first")
    if not coordinator.takes_decisions:
        raise _Refused("invalid", "the run is between two generations; ask again in a moment")
    if under_way := desk.book.under_way(command.replica):
        raise _Refused("invalid", f"{under_way} is being carried out; ask again in a moment")
    try:
        comparison = compare(desk.situation(coordinator), command.replica, wanted=command.kind)
    except PlanError as error:
        raise _Refused("invalid", str(error)) from error
    if not comparison.choice.feasible:
        raise _Refused(
            "invalid", f"{comparison.choice.title} is not possible: {comparison.choice.reason}"
        )
    desk.book.supersede(command.replica, f"{command.who} asked for something else")
    proposal = desk.open(
        coordinator,
        command.replica,
        comparison.options,
        comparison.recommended,
        now,
        facts=None,
        cause=f"asked for by {command.who}" + (f": {command.reason}" if command.reason else ""),
    )
    return f"opened proposal {proposal.id}: {comparison.choice.title}"


def _pause_or_resume(coordinator: Coordinator, command: Pause | Resume, now: float) -> str:
    pause = isinstance(command, Pause)
    if why := coordinator.pausing.obstacle(coordinator, pause=pause):
        raise _Refused("invalid", why)
    reason = f": {command.reason}" if command.reason else ""
    if pause:
        coordinator.pausing.pause(coordinator, f"paused by {command.who}{reason}", now)
        return "the run pauses at the next step boundary"
    coordinator.pausing.resume(coordinator, f"resumed by {command.who}{reason}", now)
    return "the run goes on"


def _report(coordinator: Coordinator, command: Report, now: float) -> str:
    _known_gpu(coordinator, command.gpu)
    if not command.reason.strip():
        raise _Refused("invalid", "a report needs a reason")
    return coordinator.examiner.report(coordinator, command, now)


def _known_gpu(coordinator: Coordinator, gpu: str) -> None:
    if gpu not in coordinator.fleet:
        racks = ", ".join(
            f"{rack.name}/0..{rack.gpus - 1}" for rack in coordinator.config.cluster.racks
        )
        raise _Refused("unknown", f"there is no GPU {gpu}; the run has {racks}")


def _fault(coordinator: Coordinator, command: Fault, now: float, outgoing: Outgoing) -> str:
    _known_gpu(coordinator, command.gpu)
    view = coordinator.fleet[command.gpu]
    if command.kind != "repair" and coordinator.config.cluster.device != "emulated":
        raise _Refused("not_allowed", "faults can be injected on emulated devices only")
    if command.kind != "repair" and view.status != "alive":
        raise _Refused("invalid", f"{command.gpu} has no live worker")
    if command.kind in ("kill", "hang"):
        how: Literal["kill", "hang"] = "kill" if command.kind == "kill" else "hang"
        coordinator.order(m.KillWorker(gpu=view.gpu, how=how), view.host)
        message = f"{command.kind} injected into {view.gpu}"
    elif command.kind == "slow":
        if not 1.0 <= command.factor <= 100.0:
            raise _Refused("invalid", f"factor is {command.factor}; allowed: 1.0 to 100.0")
        view.slowness = command.factor
        coordinator.order(m.SetDevice(slowness={view.gpu: command.factor}), view.host)
        message = f"{view.gpu} now runs {command.factor:g} times slower"
    else:
        message = _repair(coordinator, command, now)
    outgoing.put(
        Record(
            entry=EventHappened(
                seq=0,
                at=now,
                run=coordinator.run,
                kind=f"{command.kind}_requested",
                severity="info",
                message=f"{message} (by {command.who})",
                generation=coordinator.number,
                replica=view.replica,
                rack=command.gpu.partition("/")[0],
                gpu=command.gpu,
            )
        )
    )
    return message


def _set_budget(coordinator: Coordinator, command: SetBudget, now: float) -> str:
    try:
        return coordinator.power.set_budget(coordinator, command, now)
    except PlanError as error:
        raise _Refused("invalid", str(error)) from error


def _repair(coordinator: Coordinator, command: Fault, now: float) -> str:
    view = coordinator.fleet[command.gpu]
    if view.status == "alive":
        is_well = coordinator.examiner.verdict(view.gpu).state == "healthy"
        if view.slowness == 1.0 and is_well:
            raise _Refused("invalid", f"{view.gpu} is alive; there is nothing to repair")
        view.slowness = 1.0
        coordinator.order(m.SetDevice(slowness={view.gpu: 1.0}), view.host)
        coordinator.examiner.forgiven(coordinator, view.gpu, now)
        return f"{view.gpu} is back to speed"
    if view.status == "starting":
        raise _Refused("invalid", f"{view.gpu} is already being brought back")
    view.status, view.since = "starting", now
    coordinator.examiner.repair_began(coordinator, view.gpu, now)
    coordinator.order(m.StartWorkers(gpus=(view.gpu,), store=coordinator.store), view.host)
    return f"{view.gpu} is being brought back"
