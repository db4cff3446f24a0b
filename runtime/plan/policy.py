"""The policy: who answers a proposal, and by when.

Pure. One rule stands above the config: the run never waits for a person, so what keeps the last
replica training is done at once. What two people must approve is never carried out unasked.
"""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import msgspec

from runtime.config_errors import explain
from runtime.errors import ConfigError
from runtime.plan.policy_config import PolicyConfig, QuietHours
from storage.policy_state import (
    ANSWER_WORDS,
    MODE_MEANS,
    MODE_WORDS,
    POLICY_KINDS,
    Answer,
    Decider,
    KindRule,
    Mode,
    PolicyKind,
    PolicyState,
)
from storage.records import ActionKind

Reaction = Literal["act", "wait", "act_at_deadline", "advise", "observe"]

_REACTIONS: dict[Answer, Reaction] = {
    "auto": "act",
    "approve": "wait",
    "auto_after_deadline": "act_at_deadline",
    "recommend": "advise",
    "observe": "observe",
}
_BRAKES: dict[Mode, Answer] = {"observe": "observe", "recommend": "recommend"}
# What the mode "act" alone carries out; the others give something up.
_SAFE: frozenset[PolicyKind] = frozenset(("shrink", "grow", "replace"))
_KINDS: dict[ActionKind, PolicyKind] = {
    "shrink": "shrink",
    "shrink_boost": "shrink",
    "grow": "grow",
    "drop": "drop",
    "replace": "replace",
    "restart": "restart",
}


class Ruling(NamedTuple):
    """What becomes of a proposal. auto_at: when it is carried out unless answered before (None:
    never unasked). expires_at: when it lapses unanswered. reason: for the journal and screen."""

    reaction: Reaction
    auto_at: float | None
    expires_at: float
    reason: str
    num_approvals: int = 1
    decider: Decider = "approver"


class InForce(NamedTuple):
    """The mode that holds, and the quiet hours (with their end) that make it so."""

    mode: Mode
    quiet: QuietHours | None = None
    until: float = 0.0

    @property
    def words(self) -> str:
        if self.quiet is None:
            return ""
        end = datetime.fromtimestamp(self.until, UTC)
        return f"{self.quiet.words}, until {end:%H:%M} UTC"


def in_force(policy: PolicyConfig, now: float) -> InForce:
    """The mode at `now` (epoch seconds). Of several quiet hours at once the most careful counts;
    no quiet hours loosen a policy that observes or recommends."""
    order: tuple[Mode, ...] = ("observe", "recommend", "act_with_approval", "act")
    found = [
        InForce(window.mode, window, until)
        for window in policy.quiet_hours
        if (until := window.ends_at(now)) is not None
    ]
    own = InForce(policy.mode)
    if own.mode in _BRAKES or not found:
        found.insert(0, own)
    return min(found, key=lambda one: order.index(one.mode))


def answer_for(policy: PolicyConfig, kind: ActionKind, now: float) -> Answer:
    """What holds at `now` for an action, never "by_mode"; what has no key needs approval."""
    force = in_force(policy, now)
    if force.mode in _BRAKES:
        return _BRAKES[force.mode]
    key = _KINDS.get(kind)
    if key is None:
        return "approve"
    alone = policy.num_approvals(key) == 1
    if force.quiet is not None and force.mode == "act_with_approval":
        return "approve"
    if force.quiet is not None and alone and key in force.quiet.kinds:
        return "auto"
    own: Answer = getattr(policy, key)
    if own != "by_mode":
        return own
    return "auto" if policy.mode == "act" and key in _SAFE and alone else "approve"


def rule(
    policy: PolicyConfig,
    kind: ActionKind,
    *,
    created_at: float,
    others_train: bool,
    now: float | None = None,
    by_hand: bool = False,
) -> Ruling:
    """Decide who answers a proposal whose recommendation is of `kind`.

    Args:
        others_train: some replica trains while the proposal waits.
        now: when the ruling is made, created_at unless the policy changed since.
        by_hand: a person asked for it: what is automatic for the planner's own needs approval then.

    Returns:
        A ruling; a deadline never lies after the expiry.
    """
    now = created_at if now is None else now
    expires_at = created_at + policy.expires_s
    if not others_train and kind != "carry_on":
        return Ruling("act", now, expires_at, "no other replica trains: the run cannot wait")
    answer = answer_for(policy, kind, now)
    key = _KINDS.get(kind)
    people = policy.num_approvals(key) if key else 1
    decider: Decider = policy.decider(key) if key else "approver"
    reaction = _REACTIONS[answer]
    if by_hand and reaction in ("act", "act_at_deadline"):
        reaction = "wait"
    auto_at = None
    if reaction == "act":
        auto_at = now
    elif reaction == "act_at_deadline":
        auto_at = min(now + policy.deadline_s, expires_at)
    words = {
        "act": "is automatic",
        "wait": f"needs {people} approvals by different people" if people > 1 else "needs approval",
        "act_at_deadline": f"is automatic after {policy.deadline_s:g} s",
        "advise": "is recommended only",
        "observe": "is not proposed",
    }[reaction]
    force = in_force(policy, now)
    why = f" ({force.words})" if force.words else ""
    return Ruling(
        reaction, auto_at, expires_at, f"policy: {_name(kind)} {words}{why}", people, decider
    )


def barred(policy: PolicyConfig, kind: ActionKind, now: float) -> str:
    """Why nobody can have `kind` carried out now, "" when somebody can."""
    answer = answer_for(policy, kind, now)
    if answer not in ("observe", "recommend"):
        return ""
    force = in_force(policy, now)
    if force.mode in _BRAKES:
        why = f" ({force.words})" if force.words else ""
        return f"the policy's mode is {MODE_WORDS[force.mode]}{why}: {MODE_MEANS[force.mode]}"
    return f"the policy says of {_name(kind)}: {ANSWER_WORDS[answer]}"


def _name(kind: ActionKind) -> str:
    return "shrink and boost" if kind == "shrink_boost" else kind.replace("_", " ")


def state_of(policy: PolicyConfig, now: float) -> PolicyState:
    """The policy as it is told to people; who changed it is the caller's to add."""
    force = in_force(policy, now)
    return PolicyState(
        mode=force.mode,
        quiet=force.words,
        rules=tuple(
            KindRule(
                kind=kind,
                own=getattr(policy, kind),
                answer=answer_for(policy, kind, now),
                num_approvals=policy.num_approvals(kind),
                decider=policy.decider(kind),
            )
            for kind in POLICY_KINDS
        ),
        values=msgspec.to_builtins(policy),
    )


def changed(policy: PolicyConfig, changes: dict[str, str]) -> PolicyConfig:
    """`policy` with `changes`: dotted key -> value as TOML (quotes around a word may be left out).

    Raises:
        ConfigError: names the key, the value and what is allowed.
    """
    data: dict[str, Any] = msgspec.to_builtins(policy)
    for key, text in changes.items():
        table, _, entry = key.partition(".")
        place: Any = data.get(table) if entry else data
        if not isinstance(place, dict):
            raise ConfigError(f"`policy.{key}` is no key of the policy: `{table}` is no table")
        place[entry or table] = _value(key, text)
    try:
        return msgspec.convert(data, PolicyConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy: {explain(error, data, PolicyConfig)}") from error


def _value(key: str, text: str) -> Any:
    """The value of `text` as TOML, else the word itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text.strip().startswith(("[", "{", '"', "'")):
            raise ConfigError(f"`policy.{key}` is {text!r}, which is no TOML: {error}") from error
        return text.strip()
