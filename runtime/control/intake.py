"""Commands as they come in: signed as they must be, answered once however often sent, and each
answer in the journal, from which the audit is made. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from runtime.control.answers import answer_command
from runtime.control.instructions import Answer, Outgoing, Record, event_of
from storage.audit import described
from storage.audit_records import CommandAnswered
from storage.commands import Command, CommandResult, Decide
from storage.records import JournalEntry

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator

KEPT_ANSWERS = 1000


class Intake:
    """Takes the commands of one run. checks_identity: whether only signed ones are carried out."""

    def __init__(self, *, run: str, outgoing: Outgoing) -> None:
        self._run = run
        self._outgoing = outgoing
        self._answered: dict[str, CommandResult] = {}
        self._refusal: Callable[[Command, float], str] = lambda command, now: ""
        self.checks_identity = False

    def require_identity(self, refusal: Callable[[Command, float], str]) -> None:
        """From now on carry out only commands for which `refusal(command, now)` is ""."""
        self._refusal, self.checks_identity = refusal, True

    def take(self, coordinator: Coordinator, command: Command, now: float) -> None:
        """Carry a command out; one with an id that was answered before gets that answer again."""
        known, why = self._answered.get(command.id), self._refusal(command, now)
        if known is not None:
            result = msgspec.structs.replace(known, code="duplicate")
        elif why:
            # Not kept: who forges a command must not answer for the id of a genuine one.
            result = self._refuse(coordinator, command, why, now)
        else:
            result = answer_command(coordinator.desk, coordinator, command, now, self._outgoing)
            self._keep(result)
        self._record(command, result, why, now)
        self._outgoing.put(Answer(result=result))

    def unreadable(self, position: str, now: float) -> None:
        """Record that something was in the stream of commands that is none."""
        entry = CommandAnswered(
            seq=0, at=now, run=self._run, id="", who="", role="", via="", reason="", ok=False,
            what=f"an entry of the commands' stream, {position}", code="invalid",
            message="it does not decode and was skipped",
        )  # fmt: skip
        self._outgoing.put(Record(entry=entry))

    def replay(self, entry: JournalEntry) -> None:
        """Know again what an earlier controller answered: a command must not count twice."""
        if isinstance(entry, CommandAnswered) and entry.code not in ("duplicate", "not_allowed"):
            answer = {name: getattr(entry, name) for name in ("id", "at", "ok", "code", "message")}
            self._keep(CommandResult(**answer))

    def _keep(self, result: CommandResult) -> None:
        self._answered[result.id] = result
        for old in list(self._answered)[:-KEPT_ANSWERS]:
            del self._answered[old]

    def _record(self, command: Command, result: CommandResult, why: str, now: float) -> None:
        entry = CommandAnswered(
            seq=0, at=now, run=self._run, id=command.id, who=command.who, role=command.role,
            via=command.via, what=described(command), reason=getattr(command, "reason", ""),
            ok=result.ok and not why,
            # Somebody else's copy of a genuine command is answered like it, and recorded as it is
            code="not_allowed" if why else result.code, message=why or result.message,
        )  # fmt: skip
        self._outgoing.put(Record(entry=entry))

    def _refuse(
        self, coordinator: Coordinator, command: Command, why: str, now: float
    ) -> CommandResult:
        what = type(command).__name__.lower()
        text = f"{what} {command.id[:64]!r} in the name of {command.who[:64]!r}: {why}"
        self._outgoing.put(
            event_of(self._run, coordinator.number, "command_refused", "warning", text, now)
        )
        book = coordinator.desk.book
        proposal = book.get(command.proposal) if isinstance(command, Decide) else None
        if isinstance(command, Decide) and proposal is not None:
            # The live store may have taken the answer: write above it what really stands.
            book.bump(proposal, max(proposal.revision, command.revision + 1))
        return CommandResult(id=command.id, at=now, ok=False, code="not_allowed", message=why)
