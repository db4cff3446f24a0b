"""Who may do what with a proposal, in words, and the policy as the page writes it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from app.commands import Author
from app.policy_panel import _inline
from app.rights import why_not_approve, why_not_decide
from runtime.config import PolicyConfig
from runtime.plan.policy import changed
from runtime.plan.policy_config import QuietHours
from tests.contract import records


@pytest.mark.parametrize(
    ("role", "proposal", "decide", "approve"),
    [
        ("approver", {}, "", ""),
        ("", {}, "takes the role approver or higher; yours is none.", "yours is none."),
        ("operator", {}, "yours is operator.", "yours is operator."),
        (
            "approver",
            {"decider": "admin"},
            "asks for the role admin here",
            "asks for the role admin",
        ),
        ("admin", {"decider": "admin"}, "", ""),
        (
            "admin",
            {"barred": "the mode is recommend"},
            "",
            "Nobody can approve it now: the mode is",
        ),
        (
            "admin",
            {"approvals_needed": 2, "approvals": records.approvals("ana")},
            "",
            "Ana has approved it already; another person must.",
        ),
        ("admin", {"approvals_needed": 2, "asked_by": "ana"}, "", "Ana asked for it and cannot"),
        ("admin", {"approvals_needed": 1, "asked_by": "ana"}, "", ""),
    ],
)
def test_why_not(role: Any, proposal: dict[str, Any], decide: str, approve: str) -> None:
    author, one = Author(who="ana", role=role), records.proposal(**proposal)
    for why, words in (
        (why_not_decide(one, author), decide),
        (why_not_approve(one, author), approve),
    ):
        assert (words in why) if words else why == ""


def test_quiet_hours_come_back_as_they_were_shown() -> None:
    policy = PolicyConfig(
        quiet_hours=(
            QuietHours(begin="22:00", end="06:00", days=("fri", "sat"), zone="Europe/Berlin"),
            QuietHours(begin="09:00", end="10:30", mode="recommend", kinds=()),
        )
    )
    shown = [_inline(one) for one in msgspec.to_builtins(policy)["quiet_hours"]]
    assert changed(PolicyConfig(), {"quiet_hours": f"[{', '.join(shown)}]"}) == policy
