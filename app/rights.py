"""What the person here may do with a proposal, and why not, in words; the runtime checks all of it
again.
"""

from __future__ import annotations

from app.commands import Author
from storage.commands import Decide
from storage.identity import ROLES, least_role, may
from storage.records import Proposal


def why_not_decide(proposal: Proposal, author: Author) -> str:
    """Why `author` cannot answer `proposal` at all, "" when they can."""
    if not may(author.role, Decide):
        return f"This takes the role {least_role(Decide)} or higher; {_yours(author)}."
    places = {str(role): place for place, role in enumerate(ROLES)}
    if places[author.role] < places[proposal.decider]:
        return f"The policy asks for the role {proposal.decider} here; {_yours(author)}."
    return ""


def why_not_approve(proposal: Proposal, author: Author) -> str:
    """Why `author` cannot approve `proposal`, "" when they can."""
    if why := why_not_decide(proposal, author):
        return why
    if proposal.barred:
        return f"Nobody can approve it now: {proposal.barred}."
    why = proposal.no_second(author.who)
    return f"{why[:1].upper()}{why[1:]}." if why else ""


def _yours(author: Author) -> str:
    return f"yours is {author.role or 'none'}"
