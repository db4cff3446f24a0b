"""What people ask for by hand: a change of one replica, or an applied proposal taken back. It
becomes a proposal with the planner's prediction, and then goes the usual way to approval. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from runtime.control.refused import Refused
from runtime.errors import PlanError
from runtime.plan.planner import Comparison, compare
from storage.commands import Trigger
from storage.records import ActionKind, Proposal, ReplicaState

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator
    from runtime.control.desk import Desk


class _Inverse(NamedTuple):
    """What takes a proposal back: an action, and the live slots that it leaves out."""

    kind: ActionKind
    left_out: tuple[int, ...]


def trigger(desk: Desk, coordinator: Coordinator, command: Trigger, now: float) -> str:
    """Open the proposal that was asked for; what came of it, in words.

    Raises:
        Refused: it makes no sense as the run stands, or policy does not have it.
    """
    if coordinator.plan is None:
        raise Refused("invalid", "the run is still starting")
    if coordinator.phase == "paused":
        raise Refused("invalid", f"the run is {coordinator.pausing.why}; resume it first")
    if not coordinator.takes_decisions:
        raise Refused("invalid", "the run is between two generations; ask again in a moment")
    if under_way := desk.book.under_way(command.replica):
        raise Refused("invalid", f"{under_way} is being carried out; ask again in a moment")
    undone = _undone(desk, coordinator, command) if command.undoes else None
    try:
        comparison = _compare(desk, coordinator, command, undone)
    except PlanError as error:
        raise Refused("invalid", str(error)) from error
    choice = comparison.choice
    if not choice.feasible:
        raise Refused("invalid", f"{choice.title} is not possible: {choice.reason}")
    if desk.policy.observes(choice.kind, now):
        raise Refused("not_allowed", f"the policy has nothing proposed of this kind: {choice.kind}")
    desk.book.supersede(command.replica, f"{command.who} asked for something else")
    reason = f": {command.reason}" if command.reason else ""
    what = f"to take back {undone.id}, asked for" if undone else "asked for"
    proposal = desk.open(
        coordinator,
        comparison,
        now,
        facts=None,
        cause=f"{what} by {command.who}{reason}",
        asked_by=command.who,
        undoes=undone.id if undone else "",
    )
    return f"opened proposal {proposal.id}: {choice.title}"


def _compare(
    desk: Desk, coordinator: Coordinator, command: Trigger, undone: Proposal | None
) -> Comparison:
    if undone is None:
        return compare(desk.situation(coordinator), command.replica, wanted=command.kind)
    replica = undone.replica
    assert coordinator.plan is not None
    now = coordinator.progress.replica_states(coordinator.plan)[replica]
    back = _inverse(undone.before[replica], now, coordinator.fleet.alive(replica))
    situation = desk.situation(coordinator, left_out={replica: back.left_out})
    return compare(situation, replica, wanted=back.kind)


def _undone(desk: Desk, coordinator: Coordinator, command: Trigger) -> Proposal:
    """The proposal to take back.

    Raises:
        Refused: it was not applied, or the replica has changed since.
    """
    proposal = desk.book.get(command.undoes)
    if proposal is None or proposal.replica != command.replica:
        raise Refused("unknown", f"replica {command.replica} has no proposal {command.undoes}")
    if proposal.state != "applied":
        raise Refused(
            "invalid", f"{proposal.id} is {proposal.state}: there is nothing to take back"
        )
    if proposal.options[proposal.chosen or 0].kind == "restart":
        raise Refused("invalid", f"{proposal.id} restarted the run: that cannot be taken back")
    assert coordinator.plan is not None
    now = coordinator.plan.replicas[proposal.replica]
    shape = now.live if now.mode == "training" else ()
    if shape != proposal.options[proposal.chosen or 0].shape[proposal.replica]:
        raise Refused(
            "invalid",
            f"replica {proposal.replica} has changed since {proposal.id} was applied; ask for what "
            "you want instead",
        )
    return proposal


def _inverse(before: ReplicaState, now: ReplicaState, alive: tuple[int, ...]) -> _Inverse:
    """How to get from `now` back to `before`, as far as its slots are still alive."""
    if before.mode != "training":
        return _Inverse("drop", ())
    target = tuple(slot for slot in before.live if slot in alive)
    left_out = tuple(slot for slot in alive if slot not in target)
    if now.mode != "training":
        return _Inverse("grow" if len(target) == len(before.gpus) else "shrink", left_out)
    if set(target) - set(now.live):
        return _Inverse("grow", left_out)
    return _Inverse("shrink_boost" if before.boost_w > 0 else "shrink", left_out)
