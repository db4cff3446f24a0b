"""Journal entries as rows of the history's tables. Pure: knows tables and records, no database."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Table

from storage.history import tables
from storage.records import (
    DecisionMade,
    EventHappened,
    GenerationFormed,
    JournalEntry,
    LedgerSpent,
    ProposalChanged,
    StepCommitted,
    encode_json,
    encode_packed,
)

Row = dict[str, Any]
_MAX_BAD_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class BadEntry:
    """A journal entry that does not decode, or that the database refused; kept as it came."""

    seq: int
    at: float
    error: str
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Entries [begin, end) that the live store lost for good before they were recorded."""

    begin: int
    end: int
    at: float


Recordable = JournalEntry | BadEntry | Gap


def rows_of(run: str, items: Sequence[Recordable]) -> dict[Table, list[Row]]:
    """Rows per table, in order; of a step committed twice only the later one."""
    rows: dict[Table, list[Row]] = defaultdict(list)
    steps: dict[int, Row] = {}
    for item in items:
        match item:
            case StepCommitted():
                steps[item.step] = _step(item)
            case BadEntry():
                rows[tables.BAD_RECORDS].append(_bad_record(item))
                rows[tables.EVENTS].append(_bad_record_event(item))
            case Gap():
                rows[tables.EVENTS].append(_gap_event(item))
            case EventHappened():
                rows[tables.EVENTS].append(_event(item))
            case GenerationFormed():
                rows[tables.GENERATIONS].append(_generation(item))
            case ProposalChanged():
                rows[tables.PROPOSALS].append(_proposal(item))
            case DecisionMade():
                rows[tables.DECISIONS].append(_decision(item))
            case LedgerSpent():
                rows[tables.LEDGER].append(_interval(item))
    if steps:
        rows[tables.STEPS] = list(steps.values())
    return {table: [row | {"run": run} for row in found] for table, found in rows.items()}


def number(value: float | None) -> float | None:
    """NULL for what is not a finite number: SQLite cannot store NaN, and means NULL by it."""
    return value if value is not None and math.isfinite(value) else None


def _json(value: Any) -> str:
    return encode_json(value).decode()


def _step(entry: StepCommitted) -> Row:
    return {
        "step": entry.step,
        "seq": entry.seq,
        "at": entry.at,
        "generation": entry.generation,
        "loss": number(entry.loss),
        "grad_norm": number(entry.grad_norm),
        "tokens": entry.tokens,
        "step_s": number(entry.step_s),
        "exposed_sync_s": number(entry.exposed_sync_s),
        "samples": _json(entry.samples),
        "replica_step_s": _json(entry.replica_step_s),
    }


def _generation(entry: GenerationFormed) -> Row:
    return {
        "seq": entry.seq,
        "at": entry.at,
        "generation": entry.generation,
        "first_step": entry.first_step,
        "cause": entry.cause,
        "proposal": entry.proposal,
        "reconfigure_s": number(entry.reconfigure_s),
        "bytes_moved": entry.bytes_moved,
        "shape": _json([replica.live for replica in entry.replicas]),
        "body": encode_packed(entry),
    }


def _event(entry: EventHappened) -> Row:
    row = msgspec.structs.asdict(entry)
    return row | {"details": _json(entry.details)}


def _proposal(entry: ProposalChanged) -> Row:
    proposal = entry.proposal
    copied = (
        "id", "revision", "generation", "replica", "kind", "state", "state_reason", "decided_by",
    )  # fmt: skip
    row: Row = {name: getattr(proposal, name) for name in copied}
    return row | {"seq": entry.seq, "at": entry.at, "body": encode_packed(proposal)}


def _decision(entry: DecisionMade) -> Row:
    return msgspec.structs.asdict(entry)


def _interval(entry: LedgerSpent) -> Row:
    return {
        "seq": entry.seq,
        "at": entry.at,
        "bucket": entry.bucket,
        "begin_at": entry.begin,
        "end_at": entry.end,
        "tokens": entry.tokens,
    }


def _bad_record(bad: BadEntry) -> Row:
    return {
        "seq": bad.seq,
        "at": bad.at,
        "error": bad.error,
        "body": bad.body[:_MAX_BAD_BYTES],
    }


def _bad_record_event(bad: BadEntry) -> Row:
    return _own_event(
        bad.seq,
        bad.at,
        "bad_record",
        f"Journal entry {bad.seq} could not be recorded and was set aside: {bad.error}",
        {"seq": bad.seq},
    )


def which(gap: Gap) -> str:
    """The lost entries in words."""
    last = gap.end - 1
    return f"entry {gap.begin}" if gap.begin == last else f"entries {gap.begin} to {last}"


def _gap_event(gap: Gap) -> Row:
    return _own_event(
        gap.begin,
        gap.at,
        "journal_gap",
        f"The live store lost journal {which(gap)} before they were recorded",
        {"begin": gap.begin, "end": gap.end},
    )


def _own_event(seq: int, at: float, kind: str, message: str, details: dict[str, int]) -> Row:
    return {
        "seq": seq,
        "at": at,
        "kind": kind,
        "severity": "warning",
        "message": message,
        "generation": 0,
        "replica": None,
        "rack": None,
        "gpu": None,
        "details": _json(details),
    }
