"""Writes of the app: decisions and requests, out to the runtime, which checks every one of them
again.

A command id is minted when a dialog opens, so that however often it is sent, it counts once.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from storage.audit import AuditNote
from storage.audit_records import SignedIn
from storage.commands import (
    Command,
    CommandResult,
    Decide,
    Fault,
    Pause,
    Resume,
    SetBudget,
    SetPolicy,
    Stop,
    Trigger,
)
from storage.identity import AskedT, Role, least_role, may, sign
from storage.live.port import LiveStore, LiveStoreDown
from storage.records import ActionKind, Proposal, RecordError

_LOG = logging.getLogger(__name__)
REFUSALS: dict[str, str] = {
    "stale": "Refused, it is stale: the situation changed since this was proposed.",
    "expired": "Refused, it has expired.",
    "decided": "Refused, somebody has decided already.",
    "unknown": "Refused, the runtime no longer knows it.",
    "invalid": "Refused, the request makes no sense as the run stands.",
    "not_allowed": "Refused, not allowed here.",
    "down": "Not sent: the live store is away. Nothing was changed. Sending again counts once.",
}


@dataclass(frozen=True, kw_only=True)
class Author:
    """Who acts, by which way and in which role; recorded with every command."""

    who: str
    via: str = "browser"
    role: Role | Literal[""] = "admin"


def mint() -> str:
    """A fresh command id."""
    return str(uuid.uuid4())


class Commands:
    """Sends commands of one author, signed with the app's key (None: unsigned, for tests)."""

    def __init__(
        self,
        store: LiveStore,
        author: Author,
        clock: Callable[[], float] = time.time,
        key: bytes | None = None,
    ) -> None:
        self._store = store
        self._key = key
        self._author = author
        self._clock = clock

    def decide(
        self,
        command: str,
        proposal: Proposal,
        verdict: Literal["approved", "rejected"],
        option: int | None = None,
        reason: str = "",
    ) -> CommandResult:
        """Answer `proposal` as it was shown: its generation and revision travel along."""
        return self._send(
            proposal.run,
            Decide(
                id=command,
                at=self._clock(),
                who=self._author.who,
                via=self._author.via,
                proposal=proposal.id,
                generation=proposal.generation,
                revision=proposal.revision,
                verdict=verdict,
                option=option,
                reason=reason,
            ),
        )

    def trigger(
        self, command: str, run: str, replica: int, kind: ActionKind, reason: str = ""
    ) -> CommandResult:
        """Ask the planner for a proposal."""
        return self._send(
            run,
            Trigger(
                id=command,
                at=self._clock(),
                who=self._author.who,
                via=self._author.via,
                replica=replica,
                kind=kind,
                reason=reason,
            ),
        )

    def undo(self, command: str, proposal: Proposal, reason: str) -> CommandResult:
        """Ask for the inverse of an applied proposal."""
        return self._send(
            proposal.run,
            Trigger(
                id=command,
                at=self._clock(),
                who=self._author.who,
                via=self._author.via,
                replica=proposal.replica,
                kind=proposal.kind,
                reason=reason,
                undoes=proposal.id,
            ),
        )

    def set_policy(
        self, command: str, run: str, changes: dict[str, str], revision: int, reason: str
    ) -> CommandResult:
        """Change the policy; `changes` and `revision` as in `SetPolicy`."""
        return self._send(
            run,
            SetPolicy(
                id=command,
                at=self._clock(),
                who=self._author.who,
                via=self._author.via,
                changes=changes,
                revision=revision,
                reason=reason,
            ),
        )

    def ask(
        self, command: str, run: str, kind: type[Pause | Resume | Stop], reason: str = ""
    ) -> CommandResult:
        """Pause, resume or stop the whole run."""
        author = self._author
        return self._send(
            run,
            kind(id=command, at=self._clock(), who=author.who, via=author.via, reason=reason),
        )

    def set_budget(
        self, command: str, run: str, rack: str, budget_w: float, reason: str = ""
    ) -> CommandResult:
        """Set a rack's power budget in watts; 0 goes back to the configured one."""
        author = self._author
        return self._send(
            run,
            SetBudget(
                id=command,
                at=self._clock(),
                who=author.who,
                via=author.via,
                rack=rack,
                budget_w=budget_w,
                reason=reason,
            ),
        )

    def fault(
        self,
        command: str,
        run: str,
        gpu: str,
        kind: Literal["kill", "hang", "slow", "repair"],
        factor: float = 1.0,
    ) -> CommandResult:
        """Inject a fault, or report a repair; only runs on emulated devices accept it."""
        return self._send(
            run,
            Fault(
                id=command,
                at=self._clock(),
                who=self._author.who,
                via=self._author.via,
                gpu=gpu,
                kind=kind,
                factor=factor,
            ),
        )

    def tell(self, event: Literal["signed in", "signed out"]) -> bool:
        """Tell the audit that a session of this author began or ended; False: it could not be."""
        told = SignedIn(
            id=mint(),
            at=self._clock(),
            who=self._author.who,
            via=self._author.via,
            role=self._author.role,
            event=event,
        )
        return self._note(AuditNote(run="", code="", asked=self._signed(told, "")))

    def _send(self, run: str, command: Command) -> CommandResult:
        role = self._author.role
        if not may(role, type(command)):
            # The live store would show the answer as given until the runtime has refused it
            self._note(AuditNote(run=run, code="not_allowed", asked=self._signed(command, run)))
            return CommandResult(
                id=command.id, at=self._clock(), ok=False, code="not_allowed",
                message=f"It takes the role {least_role(type(command))} or higher; "
                f"yours is {role or 'none'}.",
            )  # fmt: skip
        try:
            return self._store.submit(run, self._signed(command, run), self._clock())
        except (LiveStoreDown, RecordError) as error:
            return CommandResult(
                id=command.id, at=self._clock(), ok=False, code="down", message=str(error)
            )

    def _signed(self, asked: AskedT, run: str) -> AskedT:
        return asked if self._key is None else sign(asked, run, self._author.role, self._key)

    def _note(self, note: AuditNote) -> bool:
        try:
            self._store.note(note)
        except LiveStoreDown as error:
            _LOG.warning("not in the audit: %s by %s: %s", note.code, note.asked.who, error)
            return False
        return True


def explain(result: CommandResult) -> str:
    """What became of a command, for the person who sent it."""
    if result.ok:
        return result.message or "Sent to the runtime."
    words = REFUSALS.get(result.code, f"Refused ({result.code}).")
    return f"{words} {result.message}".strip()
