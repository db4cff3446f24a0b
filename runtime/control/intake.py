"""Commands as they come in: signed as they must be, answered once however often sent. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from runtime.control.answers import answer_command
from runtime.control.instructions import Answer, Outgoing, event_of
from storage.records import Command, CommandResult, Decide

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
        result = self._answered.get(command.id)
        if result is None and (why := self._refusal(command, now)):
            # Not kept: who forges a command must not answer for the id of a genuine one.
            result = self._refuse(coordinator, command, why, now)
        elif result is None:
            result = answer_command(coordinator.desk, coordinator, command, now, self._outgoing)
            self._answered[command.id] = result
            for old in list(self._answered)[:-KEPT_ANSWERS]:
                del self._answered[old]
        else:
            result = msgspec.structs.replace(result, code="duplicate")
        self._outgoing.put(Answer(result=result))

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
