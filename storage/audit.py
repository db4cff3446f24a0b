"""Rows of the audit: who asked for what, in which role, why, and what came of it. Pure.

Each row holds the hash of the one before it, so none can be changed, left out or put in between
without breaking what follows. Two sources: the journals (every answer of a controller, every
decision of policy, every loss of a record), and notes (what never reached a controller).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import msgspec

from storage.audit_records import CommandAnswered, SignedIn
from storage.commands import Command
from storage.records import DecisionMade, encode_json

Noted = Command | SignedIn
MAX_TEXT = 2_000
_NOT_IN_WORDS = frozenset({"id", "at", "who", "via", "role", "signature", "reason"})


@dataclass(frozen=True, kw_only=True)
class AuditNote:
    """What happened before a controller could hear of it: `asked` was refused at once with `code`,
    or was a sign-in (`code` ""). run: "" for a sign-in."""

    run: str
    code: str
    asked: Noted


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """number: 1, 2, 3... over all runs. seq: place in the run's journal, or among the notes (then
    run is ""). id: of the command. The hash covers every other field, `previous` included."""

    number: int = 0
    previous: str = ""
    run: str
    seq: int
    at: float
    id: str
    who: str
    role: str
    via: str
    what: str
    reason: str
    result: str
    hash: str = ""

    def digest(self) -> str:
        """What `hash` must be."""
        return hashlib.sha256(encode_json(astuple(self)[:-1])).hexdigest()


def chained(rows: Sequence[AuditRow], number: int, previous: str) -> list[AuditRow]:
    """`rows` as the links after row `number`, whose hash is `previous` (0 and "": the first)."""
    links = []
    for row in rows:
        number += 1
        link = replace(row, number=number, previous=previous)
        link = replace(link, hash=link.digest())
        links.append(link)
        previous = link.hash
    return links


def of_entry(entry: CommandAnswered | DecisionMade) -> AuditRow | None:
    """The row of a journal entry; None for a person's decision, whose command has a row."""
    if isinstance(entry, CommandAnswered):
        return _row(
            entry.run, entry.seq, entry.at,
            id=entry.id, who=entry.who, role=entry.role, via=entry.via, what=entry.what,
            reason=entry.reason, result=f"{entry.code}: {entry.message}",
        )  # fmt: skip
    if entry.via != "policy":
        return None
    option = "" if entry.option is None else f", option {entry.option}"
    return _row(
        entry.run, entry.seq, entry.at,
        id=entry.id, who=entry.who, role="policy", via=entry.via, reason=entry.reason,
        what=f"decide: {entry.verdict} {entry.proposal}{option}, generation {entry.generation}",
        result="done",
    )  # fmt: skip


def of_note(
    note: AuditNote, position: int, at: float, is_genuine: Callable[[Noted, str], bool]
) -> AuditRow:
    """The row of a note. at: when the store took it. is_genuine(asked, run): whether its signature
    is a known writer's."""
    asked = note.asked
    words = (f"for run {note.run}: " if note.run else "") + described(asked)
    result = f"refused: {note.code}" if note.code else "done"
    if not is_genuine(asked, note.run):
        result += "; not signed by a known writer: it may be forged"
    return _row(
        "", position, at,
        id=asked.id, who=asked.who, role=asked.role, via=asked.via, what=words,
        reason=getattr(asked, "reason", ""), result=result,
    )  # fmt: skip


def of_loss(run: str, seq: int, at: float, what: str) -> AuditRow:
    """The row that says that records are missing or unreadable: there may have been more."""
    return _row(
        run, seq, at,
        id="", who="recorder", role="", via="recorder", what=what, reason="", result="lost",
    )  # fmt: skip


def described(asked: Noted) -> str:
    """The fields of a command in words, the same for every kind."""
    if isinstance(asked, SignedIn):
        return asked.event
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(asked).items()
        if name not in _NOT_IN_WORDS and value not in (None, "")
    }
    words = ", ".join(f"{name} {_said(value)}" for name, value in fields.items())
    kind = type(asked).__struct_config__.tag
    return f"{kind}: {words}" if words else str(kind)


def _said(value: object) -> str:
    return value if isinstance(value, str) else encode_json(value).decode()


def _row(run: str, seq: int, at: float, **texts: str) -> AuditRow:
    # A float as the database gives it back, or the hash would differ
    at = float(at) if math.isfinite(at) else 0.0
    clean: dict[str, Any] = {name: _clean(value) for name, value in texts.items()}
    return AuditRow(run=run, seq=seq, at=at, **clean)


def _clean(text: str) -> str:
    """What anybody may have written, safe for every database, terminal and page."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:MAX_TEXT])
