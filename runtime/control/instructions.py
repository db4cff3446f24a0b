"""What the coordinator tells the controller to do: orders, records, proposals, answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.control.fleet import GpuView
from runtime.control.messages import ToAgent
from runtime.plan.manifest import Manifest
from storage.commands import CommandResult
from storage.records import EventHappened, JournalEntry, Proposal, Severity


@dataclass(frozen=True, kw_only=True)
class Order:
    """Send a message to one agent, or to all when `host` is None."""

    message: ToAgent
    host: str | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """Append an entry to the journal (its seq is given there)."""

    entry: JournalEntry


def event_of(
    run: str,
    generation: int,
    kind: str,
    severity: Severity,
    message: str,
    now: float,
    *,
    view: GpuView | None = None,
    details: dict[str, object] | None = None,
) -> Record:
    """The record of an event; `view` is the GPU it happened to, None for none."""
    return Record(
        entry=EventHappened(
            seq=0,
            at=now,
            run=run,
            kind=kind,
            severity=severity,
            message=message,
            generation=generation,
            replica=view.replica if view else None,
            rack=view.gpu.partition("/")[0] if view else None,
            gpu=view.gpu if view else None,
            details=details or {},
        )
    )


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Write a proposal's present form to the live store, and to the journal."""

    proposal: Proposal


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Tell a person what became of a command."""

    result: CommandResult


@dataclass(frozen=True, kw_only=True)
class Seal:
    """All parts of a checkpoint are on disk: check them and write the manifest. told: what to say
    once that is done."""

    folder: str
    manifest: Manifest
    told: str


@dataclass(frozen=True, kw_only=True)
class FindCheckpoint:
    """Find the newest checkpoint of the run that can be trusted; tell `Fallback.found`."""


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The run is over."""

    status: Literal["stopped", "failed"]
    reason: str


Instruction = Order | Record | Publish | Answer | Seal | FindCheckpoint | Finish


class Outgoing:
    """Instructions collected while one event is handled."""

    def __init__(self) -> None:
        self._items: list[Instruction] = []

    def put(self, item: Instruction) -> None:
        self._items.append(item)

    def take(self) -> list[Instruction]:
        items, self._items = self._items, []
        return items
