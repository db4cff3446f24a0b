"""Answers of people to proposals: who may give one, whether it still can count, how many it takes.

Whatever is refused leaves the proposal as it was, or says why it stands no longer; the live store
may have taken the answer already, so the book writes above it. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from runtime.control.refused import Refused
from runtime.control.since import clock, duration, since
from runtime.errors import PlanError
from storage.commands import Decide
from storage.identity import ROLES
from storage.policy_state import Approval
from storage.records import DecisionMade, Proposal

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator
    from runtime.control.desk import Desk


def answer_decision(desk: Desk, coordinator: Coordinator, command: Decide, now: float) -> str:
    """Take one person's answer; what came of it, in words.

    Raises:
        Refused: it does not count; says why and what changed since.
    """
    proposal = desk.book.get(command.proposal)
    if proposal is None:
        raise Refused("unknown", f"there is no proposal {command.proposal} in this run")
    try:
        _require_standing(desk, coordinator, proposal, command, now)
        _require_right(desk, proposal, command)
        if command.verdict == "rejected":
            return _close(desk, coordinator, proposal, command, None, now)
        option = _require_choice(proposal, command)
        _require_fresh_evidence(desk, coordinator, proposal, now)
        if proposal.approvals_left > 1:
            return _count(desk, proposal, command, option, now)
        return _close(desk, coordinator, proposal, command, option, now)
    except Refused:
        desk.book.bump(proposal, max(proposal.revision, command.revision + 1))
        raise


# what stands in the way ------------------------------------------------------------------------


def _require_standing(
    desk: Desk, coordinator: Coordinator, proposal: Proposal, command: Decide, now: float
) -> None:
    state = proposal.state
    more = since(desk, coordinator, proposal, now)
    if state in ("stale", "expired"):
        why = f"{proposal.state_reason}. " if proposal.state_reason else ""
        raise Refused(state, f"proposal {proposal.id} is {state}: {why}{more}")
    if state != "open":
        by = f" by {proposal.decided_by}" if proposal.decided_by else ""
        at = f" at {clock(proposal.decided_at)}" if proposal.decided_at else ""
        verdict = "rejected" if state == "rejected" else "approved"
        raise Refused(
            "decided", f"proposal {proposal.id} was {verdict}{by}{at} and is {state} now. {more}"
        )
    numbers = {command.generation, proposal.generation, coordinator.number}
    if len(numbers) > 1 or not coordinator.takes_decisions:
        raise Refused(
            "stale",
            f"proposal {proposal.id} was computed for generation {command.generation}; "
            f"the run is in generation {coordinator.number}. {more}",
        )


def _require_right(desk: Desk, proposal: Proposal, command: Decide) -> None:
    """The role that this kind of action takes; `storage.identity` has checked the least of all."""
    if not desk.intake.checks_identity:
        return
    role = ROLES.index(command.role) if command.role in ROLES else -1
    if role < [str(one) for one in ROLES].index(proposal.decider):
        raise Refused(
            "not_allowed",
            f"role {command.role or 'none'} may not decide this; the policy asks for "
            f"{proposal.decider} to {proposal.kind} a replica",
        )


def _require_choice(proposal: Proposal, command: Decide) -> int:
    """The option that is approved."""
    if proposal.barred:
        raise Refused("not_allowed", f"{proposal.id} cannot be approved: {proposal.barred}")
    if why := proposal.no_second(command.who):
        raise Refused("not_allowed", f"{why} ({proposal.progress})")
    option = command.option if command.option is not None else proposal.recommended
    if not 0 <= option < len(proposal.options):
        raise Refused("invalid", f"option {option} does not exist")
    picked = proposal.options[option]
    if not picked.feasible:
        raise Refused("invalid", f"{picked.title} is not possible: {picked.reason}")
    if option != proposal.recommended and not command.reason.strip():
        raise Refused("invalid", "choosing another than the recommended option needs a reason")
    first = next(iter(proposal.approvals), None)
    if first is not None and first.option != option:
        raise Refused(
            "invalid",
            f"{first.who} approved {proposal.options[first.option].title!r}: approve the same, "
            "or reject with a reason",
        )
    return option


def _require_fresh_evidence(
    desk: Desk, coordinator: Coordinator, proposal: Proposal, now: float
) -> None:
    limit_s, age_s = proposal.evidence_max_age_s, now - proposal.evidence_at
    if not 0 < limit_s < age_s:
        return
    why = (
        f"the evidence is too old: the newest was seen {duration(age_s)} ago, allowed are "
        f"{duration(limit_s)}"
    )
    more = since(desk, coordinator, proposal, now)
    desk.look_again(coordinator, proposal, why, now)
    fresh = next(iter(desk.book.unfinished(proposal.replica)), None)
    again = (
        f"The runtime has looked again: {fresh.id} proposes "
        f"{fresh.options[fresh.recommended].title!r}."
        if fresh
        else "The runtime has looked again: nothing is to be proposed."
    )
    raise Refused("stale", f"proposal {proposal.id}: {why}. {more} {again}")


# what counts -----------------------------------------------------------------------------------


def _count(desk: Desk, proposal: Proposal, command: Decide, option: int, now: float) -> str:
    """One approval of several, and not the last."""
    counted = msgspec.structs.replace(
        proposal,
        approvals=(*proposal.approvals, _approval(command, option, now)),
        revision=max(proposal.revision, command.revision + 1) + 1,
    )
    desk.record(_decision(proposal, command, option, now, in_part=True))
    desk.book.put(counted)
    return f"{counted.progress}: {counted.approvals_left} more needed, by somebody else"


def _close(
    desk: Desk,
    coordinator: Coordinator,
    proposal: Proposal,
    command: Decide,
    option: int | None,
    now: float,
) -> str:
    """The answer that decides."""
    if option is None and not command.reason.strip():
        raise Refused("invalid", "rejecting needs a reason")
    # The live store counted the answer as a revision of its own; without one it is ours to count.
    revision = max(proposal.revision, command.revision) + 1
    answered = proposal
    if option is not None:
        approvals = (*proposal.approvals, _approval(command, option, now))
        answered = msgspec.structs.replace(proposal, approvals=approvals)
    decision = _decision(proposal, command, option, now)
    try:
        desk.decide(coordinator, answered, decision, revision=revision)
    except PlanError as error:
        more = since(desk, coordinator, proposal, now)
        raise Refused("stale", f"proposal {proposal.id}: {error}. {more}") from error
    return f"proposal {proposal.id} {command.verdict} by {command.who}"


def _approval(command: Decide, option: int, now: float) -> Approval:
    return Approval(who=command.who, via=command.via, at=now, option=option, reason=command.reason)


def _decision(
    proposal: Proposal, command: Decide, option: int | None, now: float, *, in_part: bool = False
) -> DecisionMade:
    return DecisionMade(
        seq=0,
        at=now,
        run=proposal.run,
        id=command.id,
        proposal=proposal.id,
        generation=proposal.generation,
        verdict="approved_in_part" if in_part else command.verdict,
        option=option,
        who=command.who,
        via=command.via,
        reason=command.reason,
    )
