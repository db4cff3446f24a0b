"""The policy: who answers a proposal, and by when.

Pure. One rule stands above the config: the run never waits for a person, so what keeps the last
replica training is done at once.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from runtime.config import Answer, PolicyConfig
from storage.records import ActionKind

Reaction = Literal["act", "wait", "act_at_deadline"]

_REACTIONS: dict[Answer, Reaction] = {
    "auto": "act",
    "approve": "wait",
    "auto_after_deadline": "act_at_deadline",
}


class Ruling(NamedTuple):
    """What becomes of a proposal. auto_at: when it is carried out unless answered before (None:
    never unasked). expires_at: when it lapses unanswered. reason: for the journal and screen."""

    reaction: Reaction
    auto_at: float | None
    expires_at: float
    reason: str


def answer_for(policy: PolicyConfig, kind: ActionKind) -> Answer:
    """The config's answer for an action; what it has no key for needs approval."""
    if kind in ("shrink", "shrink_boost"):
        return policy.shrink
    if kind == "grow":
        return policy.grow
    if kind == "drop":
        return policy.drop
    return "approve"


def rule(
    policy: PolicyConfig, kind: ActionKind, *, created_at: float, others_train: bool
) -> Ruling:
    """Decide who answers a proposal whose recommendation is of `kind`.

    Args:
        others_train: some replica trains while the proposal waits.

    Returns:
        A ruling; a deadline never lies after the expiry.
    """
    expires_at = created_at + policy.expires_s
    if not others_train and kind != "carry_on":
        return Ruling("act", created_at, expires_at, "no other replica trains: the run cannot wait")
    answer = answer_for(policy, kind)
    reaction = _REACTIONS[answer]
    if reaction == "act":
        return Ruling(reaction, created_at, expires_at, f"policy: {kind} is automatic")
    if reaction == "wait":
        return Ruling(reaction, None, expires_at, f"policy: {kind} needs approval")
    auto_at = created_at + min(policy.deadline_s, policy.expires_s)
    return Ruling(
        reaction, auto_at, expires_at, f"policy: {kind} is automatic after {policy.deadline_s:g} s"
    )
