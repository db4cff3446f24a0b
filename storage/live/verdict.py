"""What becomes of a decision, and in which words: the same for every backend. Pure.

`judge` is the rule; scripts/submit.lua repeats it where Redis must check and change in one step,
and the contract suite holds the two together.
"""

from __future__ import annotations

import msgspec

from storage.commands import Command, CommandResult, Decide
from storage.records import Proposal


def judge(proposal: Proposal | None, decide: Decide, *, now: float, generation: int) -> str:
    """Code of a decision: "accepted", or why it cannot stand.

    Args:
        proposal: as stored now, None when there is none.
        decide: the answer to it.
        now: epoch seconds.
        generation: the generation the run's snapshot is at, 0 when unknown.
    """
    if proposal is None:
        return "unknown"
    if proposal.state != "open":
        return proposal.state if proposal.state in ("expired", "stale") else "decided"
    if now > proposal.expires_at:
        return "expired"
    seen = (decide.generation, decide.revision)
    if seen != (proposal.generation, proposal.revision) or generation > proposal.generation:
        return "stale"
    return "accepted" if decide.verdict == "rejected" else _judge_approval(proposal, decide)


def _judge_approval(proposal: Proposal, decide: Decide) -> str:
    if proposal.barred or decide.who in proposal.cannot_approve:
        return "not_allowed"
    return "accepted" if _is_feasible(proposal, decide.option) else "invalid"


def detail(proposal: Proposal, decide: Decide, code: str) -> str:
    """What the answer's words need beside the code: why it lapsed, why nobody can approve it, or
    how many approvals were missing when one of several was taken."""
    if code in ("stale", "expired"):
        if proposal.state == "open" and proposal.approvals:
            return proposal.progress
        return proposal.state_reason if proposal.state == code else ""
    if code == "not_allowed":
        return proposal.barred
    return str(proposal.approvals_left) if code == "accepted" and _in_part(proposal, decide) else ""


def decided(proposal: Proposal, decide: Decide, now: float) -> Proposal:
    """`proposal` after an accepted decision; one approval of several is the runtime's to count."""
    if _in_part(proposal, decide):
        return proposal
    option = proposal.recommended if decide.option is None else decide.option
    return msgspec.structs.replace(
        proposal,
        state=decide.verdict,
        state_reason=decide.reason,
        revision=proposal.revision + 1,
        decided_by=decide.who,
        decided_at=now,
        chosen=option if decide.verdict == "approved" else None,
    )


def result_of(
    command: Command,
    code: str,
    *,
    at: float,
    state: str = "",
    by: str = "",
    why: str = "",
    duplicate: bool = False,
) -> CommandResult:
    """The answer to whoever submitted `command`.

    Args:
        command: what was submitted.
        code: of its first submission.
        at: time of its first submission.
        state: the proposal's state at that time, "" for other commands.
        by: who had decided before.
        why: as `detail` gave it.
        duplicate: the command id was submitted before.
    """
    message = _message(command, code, state, by, why)
    return CommandResult(
        id=command.id,
        at=at,
        ok=code == "accepted",
        code="duplicate" if duplicate else code,
        message=f"Already submitted. {message}" if duplicate else message,
    )


def _is_feasible(proposal: Proposal, option: int | None) -> bool:
    index = proposal.recommended if option is None else option
    return 0 <= index < len(proposal.options) and proposal.options[index].feasible


def _in_part(proposal: Proposal, decide: Decide) -> bool:
    return decide.verdict == "approved" and proposal.approvals_left > 1


def _message(command: Command, code: str, state: str, by: str, why: str) -> str:
    if not isinstance(command, Decide):
        return "Queued for the controller."
    because = f": {why}" if why else ""
    option = "the recommended option" if command.option is None else f"option {command.option}"
    words = {
        "accepted": f"is {command.verdict}; the controller takes it from here."
        if not why
        else f"has your approval, of {why} that were missing; the controller counts it.",
        "decided": f"is already {state}" + (f", decided by {by}." if by else "."),
        "expired": f"has expired{because}; wait for the next one, or ask for one.",
        "stale": f"is stale{because}; look at what stands in its place."
        if why and state == "stale"
        else f"has changed since you looked{because}; look at it again before deciding."
        if why
        else "has changed, or was computed for a generation that no longer stands; "
        "look at it again before deciding.",
        "not_allowed": f"cannot be approved{because}."
        if why
        else f"has {command.who} behind it already; another person must approve it.",
        "invalid": f"cannot be approved with {option}: it does not exist or is not feasible.",
        "unknown": "is not known to this run.",
    }
    return f"Proposal {command.proposal} {words[code]}"
