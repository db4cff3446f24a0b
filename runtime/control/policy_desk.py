"""The policy of a run as it holds now: the configured one, changed by people, at this hour.

A change is a decision: who, when, why, before and after go into the journal, and a restarted
controller goes on with the last one it finds there. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.control.instructions import Outgoing, event_of
from runtime.plan.policy import (
    InForce,
    Ruling,
    answer_for,
    barred,
    changed,
    in_force,
    rule,
    state_of,
)
from runtime.plan.policy_config import PolicyConfig
from storage.commands import SetPolicy
from storage.policy_state import PolicyChange, PolicyState
from storage.records import ActionKind, EventHappened, JournalEntry, Proposal

CHANGED = "policy_changed"
KEPT_CHANGES = 10


class PolicyDesk:
    """Keeps the policy of one run; says what it rules and takes changes of it."""

    def __init__(self, policy: PolicyConfig, *, run: str, outgoing: Outgoing) -> None:
        self._run = run
        self._outgoing = outgoing
        self.policy = policy
        self._changes: list[PolicyChange] = []
        self._seen: tuple[int, InForce] | None = None

    @property
    def revision(self) -> int:
        """How often the policy was changed since the run began."""
        return self._changes[-1].revision if self._changes else 0

    def state(self, now: float) -> PolicyState:
        """All of it, for people."""
        return msgspec.structs.replace(
            state_of(self.policy, now),
            revision=self.revision,
            changes=tuple(self._changes),
        )

    # what it rules ---------------------------------------------------------------------------

    def observes(self, kind: ActionKind, now: float) -> bool:
        """Whether an action of `kind` is not even proposed."""
        return answer_for(self.policy, kind, now) == "observe"

    def rule(self, proposal: Proposal, now: float, *, others_train: bool) -> Proposal:
        """`proposal` with what policy says of it at `now`. Approvals given under other rules for
        who must approve are void."""
        ruling = rule(
            self.policy,
            proposal.kind,
            created_at=proposal.created_at,
            others_train=others_train,
            now=now,
            by_hand=bool(proposal.asked_by),
        )
        return msgspec.structs.replace(
            proposal,
            expires_at=ruling.expires_at,
            auto_at=ruling.auto_at,
            ruling=ruling.reason,
            approvals_needed=ruling.num_approvals,
            decider=ruling.decider,
            approvals=proposal.approvals if _same_people(proposal, ruling) else (),
            barred="" if ruling.reaction == "act" else barred(self.policy, proposal.kind, now),
            evidence_max_age_s=self.policy.evidence_max_age_s,
        )

    def has_turned(self, now: float) -> bool:
        """Whether another policy or mode holds than when this was last asked."""
        before, self._seen = self._seen, (self.revision, in_force(self.policy, now))
        return before is not None and before != self._seen

    # what changes it -------------------------------------------------------------------------

    def obstacle(self, command: SetPolicy) -> str:
        """Why a change was made from what no longer holds, "" when it was not."""
        if command.revision == self.revision:
            return ""
        by = f" by {self._changes[-1].who}: {self._changes[-1].words}" if self._changes else ""
        return f"the policy was changed meanwhile{by}; look at it again before changing it"

    def set(self, command: SetPolicy, generation: int, now: float) -> str:
        """Change the policy; what came of it, in words.

        Raises:
            ConfigError: names the key, the value and what is allowed.
        """
        before, self.policy = self.policy, changed(self.policy, dict(command.changes))
        if before == self.policy:
            return "nothing changed: the policy says so already"
        differs = _differs(before, self.policy)
        change = PolicyChange(
            revision=self.revision + 1,
            at=now,
            who=command.who,
            role=command.role,
            via=command.via,
            words="; ".join(f"{key} {old} to {new}" for key, (old, new) in differs.items()),
            reason=command.reason,
        )
        self._take(change)
        text = f"{change.who} changed the policy: {change.words} ({change.reason})"
        details: dict[str, object] = {
            **msgspec.to_builtins(change),
            "command": command.id,
            "before": {key: old for key, (old, _) in differs.items()},
            "after": {key: new for key, (_, new) in differs.items()},
            "policy": msgspec.to_builtins(self.policy),
        }
        self._outgoing.put(
            event_of(self._run, generation, CHANGED, "info", text, now, details=details)
        )
        return f"the policy is {self.state(now).words}"

    def replay(self, entry: JournalEntry) -> None:
        """Go on with what an earlier controller wrote."""
        if isinstance(entry, EventHappened) and entry.kind == CHANGED:
            self.policy = msgspec.convert(entry.details["policy"], PolicyConfig)
            self._take(msgspec.convert(entry.details, PolicyChange))

    def _take(self, change: PolicyChange) -> None:
        self._changes = [*self._changes, change][-KEPT_CHANGES:]


def _same_people(proposal: Proposal, ruling: Ruling) -> bool:
    now = (ruling.num_approvals, ruling.decider)
    return (proposal.approvals_needed, proposal.decider) == now


def _differs(before: PolicyConfig, after: PolicyConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old, new) of what is not the same."""
    old, new = _flat(msgspec.to_builtins(before)), _flat(msgspec.to_builtins(after))
    return {key: (old.get(key), new.get(key)) for key in new if old.get(key) != new.get(key)}


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{entry}": one for entry, one in value.items()}
        else:
            flat[key] = value
    return flat
