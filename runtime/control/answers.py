"""What becomes of people's commands: checked where they are carried out, answered with a reason.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from runtime.control import messages as m
from runtime.control.ballot import answer_decision
from runtime.control.instructions import Outgoing, Record
from runtime.control.refused import Refused
from runtime.control.triggers import trigger
from runtime.errors import ConfigError, PlanError
from storage.commands import (
    Command,
    CommandResult,
    Decide,
    Fault,
    Pause,
    Report,
    Resume,
    SetBudget,
    SetPolicy,
    Stop,
    Trigger,
)
from storage.records import EventHappened

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator
    from runtime.control.desk import Desk


def answer_command(
    desk: Desk, coordinator: Coordinator, command: Command, now: float, outgoing: Outgoing
) -> CommandResult:
    """Carry out one command; returns its answer."""
    try:
        if coordinator.ended is not None:
            raise Refused("invalid", f"the run is over: {coordinator.ended.reason}")
        if isinstance(command, Decide):
            message = answer_decision(desk, coordinator, command, now)
        elif isinstance(command, Trigger):
            message = trigger(desk, coordinator, command, now)
        elif isinstance(command, Fault):
            message = _fault(coordinator, command, now, outgoing)
        elif isinstance(command, Report):
            message = _report(coordinator, command, now)
        elif isinstance(command, SetBudget):
            message = _set_budget(coordinator, command, now)
        elif isinstance(command, SetPolicy):
            message = _set_policy(desk, coordinator, command, now)
        elif isinstance(command, Pause | Resume):
            message = _pause_or_resume(coordinator, command, now)
        elif not isinstance(command, Stop):
            raise Refused("invalid", "this controller does not know such a command")
        else:
            coordinator.finish("stopped", command.reason or f"stopped by {command.who}", now)
            message = "the run ends at the next step boundary"
    except Refused as refused:
        return CommandResult(
            id=command.id, at=now, ok=False, code=refused.code, message=str(refused)
        )
    return CommandResult(id=command.id, at=now, ok=True, code="done", message=message)


def _set_policy(desk: Desk, coordinator: Coordinator, command: SetPolicy, now: float) -> str:
    if not command.reason.strip():
        raise Refused("invalid", "changing the policy needs a reason")
    if why := desk.policy.obstacle(command):
        raise Refused("stale", why)
    try:
        return desk.policy.set(command, coordinator.number, now)
    except ConfigError as error:
        raise Refused("invalid", str(error)) from error


def _pause_or_resume(coordinator: Coordinator, command: Pause | Resume, now: float) -> str:
    pause = isinstance(command, Pause)
    if why := coordinator.pausing.obstacle(coordinator, pause=pause):
        raise Refused("invalid", why)
    reason = f": {command.reason}" if command.reason else ""
    if pause:
        coordinator.pausing.pause(coordinator, f"paused by {command.who}{reason}", now)
        return "the run pauses at the next step boundary"
    coordinator.pausing.resume(coordinator, f"resumed by {command.who}{reason}", now)
    return "the run goes on"


def _report(coordinator: Coordinator, command: Report, now: float) -> str:
    _known_gpu(coordinator, command.gpu)
    if not command.reason.strip():
        raise Refused("invalid", "a report needs a reason")
    return coordinator.examiner.report(coordinator, command, now)


def _known_gpu(coordinator: Coordinator, gpu: str) -> None:
    if gpu not in coordinator.fleet:
        racks = ", ".join(
            f"{rack.name}/0..{len(rack.ids) - 1}" for rack in coordinator.config.cluster.racks
        )
        raise Refused("unknown", f"there is no GPU {gpu}; the run has {racks}")


def _fault(coordinator: Coordinator, command: Fault, now: float, outgoing: Outgoing) -> str:
    _known_gpu(coordinator, command.gpu)
    view = coordinator.fleet[command.gpu]
    if command.kind != "repair" and coordinator.config.cluster.device != "emulated":
        raise Refused("not_allowed", "faults can be injected on emulated devices only")
    if command.kind != "repair" and view.status != "alive":
        raise Refused("invalid", f"{command.gpu} has no live worker")
    if command.kind in ("kill", "hang"):
        how: Literal["kill", "hang"] = "kill" if command.kind == "kill" else "hang"
        coordinator.order(m.KillWorker(gpu=view.gpu, how=how), view.host)
        message = f"{command.kind} injected into {view.gpu}"
    elif command.kind == "slow":
        if not 1.0 <= command.factor <= 100.0:
            raise Refused("invalid", f"factor is {command.factor}; allowed: 1.0 to 100.0")
        view.slowness = command.factor
        coordinator.order(m.SetDevice(slowness={view.gpu: command.factor}), view.host)
        message = f"{view.gpu} now runs {command.factor:g} times slower"
    elif command.kind == "corrupt":
        coordinator.order(m.CorruptState(gpu=view.gpu), view.host)
        every = coordinator.config.train.state_hash_every
        when = f"states are compared every {every} steps" if every else "states are never compared"
        message = f"a bit of what {view.gpu} holds is flipped; {when}"
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
        raise Refused("invalid", str(error)) from error


def _repair(coordinator: Coordinator, command: Fault, now: float) -> str:
    view = coordinator.fleet[command.gpu]
    if view.status == "alive":
        is_well = coordinator.examiner.verdict(view.gpu).state == "healthy"
        if view.slowness == 1.0 and is_well:
            raise Refused("invalid", f"{view.gpu} is alive; there is nothing to repair")
        view.slowness = 1.0
        coordinator.order(m.SetDevice(slowness={view.gpu: 1.0}), view.host)
        coordinator.examiner.forgiven(coordinator, view.gpu, now)
        return f"{view.gpu} is back to speed"
    if view.status == "starting":
        raise Refused("invalid", f"{view.gpu} is already being brought back")
    view.status, view.since = "starting", now
    coordinator.examiner.repair_began(coordinator, view.gpu, now)
    coordinator.roll_call.start_afresh(coordinator, view.gpu)
    return f"{view.gpu} is being brought back"
