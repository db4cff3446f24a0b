"""Commands: what people ask of a run, and what they are answered.

The identity that signs them is `storage.identity`'s. This module must not know any backend.
"""

from __future__ import annotations

from typing import Literal

from storage.records import ActionKind, Record


class _Asked(Record, frozen=True, kw_only=True):
    """Base of all commands. role, signature: of whoever took it from the person (identity.py)."""

    id: str
    at: float
    who: str
    via: str
    role: str = ""
    signature: str = ""


class Decide(_Asked, frozen=True, kw_only=True, tag="decide"):
    """Approve (with an option) or reject a proposal. `id` is minted when the dialog opens."""

    proposal: str
    generation: int
    revision: int
    verdict: Literal["approved", "rejected"]
    option: int | None = None
    reason: str = ""


class Trigger(_Asked, frozen=True, kw_only=True, tag="trigger"):
    """Ask for a proposal by hand; it then goes the usual way to approval. undoes: the proposal that
    it shall take back; then replica and kind are that one's."""

    replica: int
    kind: ActionKind
    reason: str = ""
    undoes: str = ""


class Fault(_Asked, frozen=True, kw_only=True, tag="fault"):
    """Inject a fault (emulated runs only) or report a repair. factor: slowness, 1.0 is none;
    "corrupt" flips a bit of what its worker holds."""

    gpu: str
    kind: Literal["kill", "hang", "slow", "corrupt", "repair"]
    factor: float = 1.0


class SetBudget(_Asked, frozen=True, kw_only=True, tag="set_budget"):
    """Set a rack's power budget, in watts; 0 goes back to the configured one."""

    rack: str
    budget_w: float
    reason: str = ""


class SetPolicy(_Asked, frozen=True, kw_only=True, tag="set_policy"):
    """Change the policy. changes: key of the configuration's `[policy]` (dotted below tables) ->
    value as TOML. revision: of the policy they were made from."""

    changes: dict[str, str]
    revision: int
    reason: str


class Stop(_Asked, frozen=True, kw_only=True, tag="stop"):
    reason: str = ""


class Pause(_Asked, frozen=True, kw_only=True, tag="pause"):
    """Stand still at the next step boundary; every process lives on and keeps its state."""

    reason: str = ""


class Resume(_Asked, frozen=True, kw_only=True, tag="resume"):
    """Go on with a paused run."""

    reason: str = ""


class Report(_Asked, frozen=True, kw_only=True, tag="report"):
    """What an operator or another system knows of a GPU; "healthy" takes back what is held against
    it."""

    gpu: str
    state: Literal["healthy", "suspect", "degraded", "draining", "failed"]
    reason: str


Command = Decide | Trigger | Fault | Stop | Pause | Resume | Report | SetBudget | SetPolicy


class CommandResult(Record, frozen=True, kw_only=True):
    """What became of a command. code: "accepted", "done", "duplicate", or why it was refused:
    "stale", "expired", "decided", "unknown", "invalid", "not_allowed"."""

    id: str
    at: float
    ok: bool
    code: str
    message: str
