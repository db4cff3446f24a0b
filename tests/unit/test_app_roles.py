"""The dashboard sends nothing that a role does not allow, and tells the audit who tried."""

from __future__ import annotations

import pytest

from app.commands import Author, Commands
from storage.audit import AuditNote
from storage.identity import Role, not_genuine
from storage.live.memory import MemoryStore
from storage.records import Proposal
from tests.contract import records

KEY = b"a" * 32
NOW = 1.0


def _desk(role: Role | str) -> tuple[MemoryStore, Proposal, Commands]:
    store, proposal = MemoryStore(), records.proposal()
    store.put_proposal(proposal)
    author = Author(who="vera", role=role)  # type: ignore[arg-type]
    return store, proposal, Commands(store, author, clock=lambda: NOW, key=KEY)


@pytest.mark.parametrize("role", ["viewer", "operator", ""])
def test_a_lesser_role_sends_no_decision(role: str) -> None:
    store, proposal, commands = _desk(role)
    result = commands.decide("c1", proposal, "approved")
    assert (result.ok, result.code) == (False, "not_allowed")
    assert "approver or higher" in result.message
    assert store.read_commands(proposal.run, "") == []
    standing = store.get_proposal(proposal.run, proposal.id)
    assert standing is not None
    assert standing.state == "open"
    ((_, _, note),) = store.read_notes(0)
    assert isinstance(note, AuditNote)
    assert (note.run, note.code, note.asked.who, note.asked.role) == (
        proposal.run, "not_allowed", "vera", role,
    )  # fmt: skip
    assert not_genuine(note.asked, proposal.run, {"app": KEY}) == ""


def test_an_approver_decides_in_their_own_name_and_role() -> None:
    store, proposal, commands = _desk("approver")
    assert commands.decide("c1", proposal, "approved").ok
    ((_, command),) = store.read_commands(proposal.run, "")
    assert command is not None
    assert (command.who, command.role) == ("vera", "approver")
    assert not_genuine(command, proposal.run, {"app": KEY}) == ""
    assert store.read_notes(0) == []


def test_coming_and_going_is_told() -> None:
    store, _, commands = _desk("viewer")
    assert commands.tell("signed in")
    assert commands.tell("signed out")
    notes = [note for _, _, note in store.read_notes(0)]
    assert [getattr(note.asked, "event", "") for note in notes if isinstance(note, AuditNote)] == [
        "signed in",
        "signed out",
    ]
