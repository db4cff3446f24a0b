"""What becomes of a decision, and in which words: the same for every backend. Pure.

`judge` is the rule; scripts/submit.lua repeats it where Redis must check and change in one step,
and the contract suite holds the two together.
"""

from __future__ import annotations

import msgspec

from storage.records import Command, CommandResult, Decide, Proposal


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
    if decide.verdict == "approved" and not _is_feasible(proposal, decide.option):
        return "invalid"
    return "accepted"


def decided(proposal: Proposal, decide: Decide, now: float) -> Proposal:
    """`proposal` after an accepted decision."""
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
    duplicate: bool = False,
) -> CommandResult:
    """The answer to whoever submitted `command`.

    Args:
        command: what was submitted.
        code: of its first submission.
        at: time of its first submission.
        state: the proposal's state at that time, "" for other commands.
        by: who had decided before.
        duplicate: the command id was submitted before.
    """
    message = _message(command, code, state, by)
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


def _message(command: Command, code: str, state: str, by: str) -> str:
    if not isinstance(command, Decide):
        return "Queued for the controller."
    option = "the recommended option" if command.option is None else f"option {command.option}"
    words = {
        "accepted": f"is {command.verdict}; the controller takes it from here.",
        "decided": f"is already {state}" + (f", decided by {by}." if by else "."),
        "expired": "has expired; wait for the next one, or trigger one.",
        "stale": "has changed, or was computed for a generation that no longer stands; "
        "look at it again before deciding.",
        "invalid": f"cannot be approved with {option}: it does not exist or is not feasible.",
        "unknown": "is not known to this run.",
    }
    return f"Proposal {command.proposal} {words[code]}"
