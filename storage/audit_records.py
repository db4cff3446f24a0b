"""What the audit is made from beside commands: their answers, and people's comings and goings."""

from __future__ import annotations

from typing import Literal

import msgspec


class CommandAnswered(msgspec.Struct, frozen=True, kw_only=True, tag="command_answered"):
    """Journal entry: what the controller made of a command, carried out or refused. what: its own
    fields in words (`storage.audit.described`). role is what the command claimed; where `code` is
    "not_allowed", `message` says whether that was true."""

    seq: int
    at: float
    run: str
    id: str
    who: str
    role: str
    via: str
    what: str
    reason: str
    ok: bool
    code: str
    message: str


class SignedIn(msgspec.Struct, frozen=True, kw_only=True, tag="signed_in"):
    """A session of the dashboard began or ended with this person in this role; signed as a command
    is."""

    id: str
    at: float
    who: str
    via: str
    event: Literal["signed in", "signed out"]
    role: str = ""
    signature: str = ""
    reason: str = ""
