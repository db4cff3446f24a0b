"""What the runtime says of its policy: records that app, shell and runtime share, and their words.

Who decides what is worked out by the runtime alone (`runtime.plan.policy`); this is how it is told.
This module must not know any backend.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Mode = Literal["observe", "recommend", "act_with_approval", "act"]
MODES: tuple[Mode, ...] = ("observe", "recommend", "act_with_approval", "act")
MODE_WORDS: dict[Mode, str] = {
    "observe": "observe",
    "recommend": "recommend",
    "act_with_approval": "act with approval",
    "act": "act",
}
MODE_MEANS: dict[Mode, str] = {
    "observe": "nothing is proposed and nothing is changed",
    "recommend": "proposals are shown; nobody can carry them out",
    "act_with_approval": "what has no answer of its own needs approval",
    "act": "what has no answer of its own is carried out at once; drop and restart need approval",
}
Answer = Literal["by_mode", "observe", "recommend", "approve", "auto_after_deadline", "auto"]
ANSWERS: tuple[Answer, ...] = (
    "by_mode", "observe", "recommend", "approve", "auto_after_deadline", "auto",
)  # fmt: skip
ANSWER_WORDS: dict[Answer, str] = {
    "by_mode": "as the mode says",
    "observe": "not proposed",
    "recommend": "proposed, not carried out",
    "approve": "needs approval",
    "auto_after_deadline": "automatic after the deadline",
    "auto": "automatic",
}
# What a policy has an answer for; a shrink with boost is a shrink.
PolicyKind = Literal["shrink", "grow", "drop", "replace", "restart"]
POLICY_KINDS: tuple[PolicyKind, ...] = ("shrink", "grow", "drop", "replace", "restart")
Decider = Literal["approver", "admin"]
DECIDERS: tuple[Decider, ...] = ("approver", "admin")


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """One person's yes to a proposal that may need several. option: index of what was approved."""

    who: str
    via: str
    at: float
    option: int
    reason: str = ""


class KindRule(msgspec.Struct, frozen=True, kw_only=True):
    """What holds now for one kind of action. own: its answer in the policy; answer: what comes of
    it in the mode that holds now."""

    kind: PolicyKind
    own: Answer
    answer: Answer
    num_approvals: int
    decider: Decider


class PolicyChange(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the policy. words: what was what and is what now. revision: from then on."""

    revision: int
    at: float
    who: str
    role: str
    via: str
    words: str
    reason: str


class PolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """The policy as it holds now.

    mode: what holds now; quiet: why it is not the policy's own ("" when it is). revision: counts
    the changes since the run began; `SetPolicy` names the one it was made from. values: the policy
    with the keys of the configuration's `[policy]`. changes: the last of them, newest last.
    """

    mode: Mode
    rules: tuple[KindRule, ...]
    values: dict[str, Any]
    revision: int = 0
    quiet: str = ""
    changes: tuple[PolicyChange, ...] = ()

    @property
    def words(self) -> str:
        """As the header shows it: the mode, and the kinds for which it does not say it all."""
        if self.mode in ("observe", "recommend"):
            text = MODE_WORDS[self.mode]
        else:
            usual = "approve" if self.mode == "act_with_approval" else "auto"
            odd: dict[Answer, list[str]] = {}
            for rule in self.rules:
                if rule.answer != usual:
                    odd.setdefault(rule.answer, []).append(rule.kind)
            parts = [f"{', '.join(kinds)}: {ANSWER_WORDS[one]}" for one, kinds in odd.items()]
            text = "; ".join([MODE_WORDS[self.mode], *parts])
        return f"{text} ({self.quiet})" if self.quiet else text
