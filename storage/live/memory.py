"""The live store in this process's memory, for tests and for embedding: a leaf behind `LiveStore`.

Keeps records encoded, like the other backends, so that what comes out is what would come out there.
One lock makes every method atomic.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from storage.audit import AuditNote
from storage.commands import Command, CommandResult, Decide
from storage.live import port
from storage.live.verdict import decided, detail, judge, result_of
from storage.live.warned import Warned
from storage.notifier_state import NotifierState
from storage.records import (
    JournalEntry,
    Proposal,
    RackRecord,
    RunState,
    decode_packed,
    encode_packed,
)

_LOG = logging.getLogger(__name__)


class _First(NamedTuple):
    """What `result_of` needs to answer a command id again."""

    code: str
    at: float
    state: str = ""
    by: str = ""
    why: str = ""


@dataclass
class _Run:
    """Everything of one run, encoded as it would be in Redis."""

    state: bytes | None = None
    racks: dict[str, bytes] = field(default_factory=dict)
    rack_history: dict[str, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    journal: dict[int, bytes] = field(default_factory=dict)
    acknowledged: int = 0
    proposals: dict[str, bytes] = field(default_factory=dict)
    commands: dict[int, bytes] = field(default_factory=dict)
    num_commands: int = 0
    submitted: dict[str, _First] = field(default_factory=dict)
    results: dict[str, bytes] = field(default_factory=dict)

    @property
    def last_seq(self) -> int:
        return next(reversed(self.journal), 0)


class MemoryStore:
    """See `LiveStore` for what each method promises. Results are kept as long as the object."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._runs: dict[str, _Run] = {}
        self._notifier: bytes | None = None
        self._notes: dict[int, tuple[float, AuditNote | str]] = {}
        self._noted: set[str] = set()
        self._num_notes = 0
        self._warned = Warned(_LOG)

    def ping(self) -> None:
        return

    def close(self) -> None:
        return

    # runs ------------------------------------------------------------------------------------
    def put_run(self, state: RunState) -> None:
        with self._changed:
            stored = self.get_run(state.run)
            if stored is not None and (
                state.updated_at < stored.updated_at or state.generation < stored.generation
            ):
                return
            self._run(state.run).state = encode_packed(state)
            known = [name for name, run in self._runs.items() if run.state is not None]
            if len(known) > port.MAX_RUNS:
                quiet = min(known, key=self._updated_at)
                if self._runs[quiet].last_seq <= self._runs[quiet].acknowledged:
                    del self._runs[quiet]

    def get_run(self, run: str) -> RunState | None:
        body = self._look(run).state
        return None if body is None else decode_packed(body, RunState)

    def list_runs(self) -> list[RunState]:
        with self._changed:
            bodies = {name: run.state for name, run in self._runs.items() if run.state is not None}
        states = [self._warned.decoded(b, RunState, f"run {name}") for name, b in bodies.items()]
        known = sorted((s for s in states if s is not None), key=_updated, reverse=True)
        return sorted(known[: port.MAX_RUNS], key=_started, reverse=True)

    # racks -----------------------------------------------------------------------------------
    def put_racks(self, records: Sequence[RackRecord]) -> None:
        with self._changed:
            for record in records:
                run, body = self._run(record.run), encode_packed(record)
                run.racks[record.rack] = body
                history, at_ms = run.rack_history[record.rack], max(1, int(record.at * 1000))
                if at_ms > next(reversed(history), 0):
                    history[at_ms] = body
                    _keep_newest(history, port.MAX_RACK_HISTORY)

    def get_racks(self, run: str) -> dict[str, RackRecord]:
        with self._changed:
            bodies = sorted(self._look(run).racks.items())
        racks = {name: self._warned.decoded(b, RackRecord, f"rack {name}") for name, b in bodies}
        return {name: record for name, record in racks.items() if record is not None}

    def rack_history(self, run: str, rack: str, count: int = 300) -> list[RackRecord]:
        with self._changed:
            bodies = _newest(self._look(run).rack_history.get(rack, {}), count)
        records = [self._warned.decoded(body, RackRecord, f"rack {rack}") for _, body in bodies]
        return [record for record in records if record is not None]

    # journal ---------------------------------------------------------------------------------
    def append(self, run: str, entries: Sequence[JournalEntry], after: int | None = None) -> int:
        with self._changed:
            kept = self._run(run)
            if after is None or kept.last_seq >= after:
                for entry in entries:
                    if entry.seq > kept.last_seq:
                        kept.journal[entry.seq] = encode_packed(entry)
                self._changed.notify_all()
            return kept.last_seq

    def last_seq(self, run: str) -> int:
        with self._changed:
            return self._look(run).last_seq

    def list_journals(self) -> dict[str, tuple[int, int]]:
        with self._changed:
            return {
                name: (run.last_seq, run.acknowledged)
                for name, run in self._runs.items()
                if run.journal
            }

    def read_journal(
        self, run: str, after: int, count: int = 500, block_ms: int = 0
    ) -> list[JournalEntry]:
        while raw := self.read_journal_raw(run, after, count, block_ms):
            entries = [self._entry(run, seq, body) for seq, body in raw]
            if good := [entry for entry in entries if entry is not None]:
                return good
            # Nothing but bad records must not look like the end of the journal
            after = raw[-1][0]
        return []

    def read_journal_raw(
        self, run: str, after: int, count: int = 500, block_ms: int = 0
    ) -> list[tuple[int, bytes]]:
        return self._wait(
            lambda: [item for item in self._look(run).journal.items() if item[0] > after][:count],
            block_ms,
        )

    def tail_journal(self, run: str, count: int) -> list[JournalEntry]:
        with self._changed:
            newest = _newest(self._look(run).journal, min(count, port.JOURNAL_TAIL))
        entries = [self._entry(run, seq, body) for seq, body in newest]
        return [entry for entry in entries if entry is not None]

    def acknowledge(self, run: str, seq: int) -> None:
        with self._changed:
            kept = self._run(run)
            kept.acknowledged = max(kept.acknowledged, seq)
            keep_from = min(kept.acknowledged, kept.last_seq - port.JOURNAL_TAIL) + 1
            for old in [held for held in kept.journal if held < keep_from]:
                del kept.journal[old]

    def acknowledged(self, run: str) -> int:
        with self._changed:
            return self._look(run).acknowledged

    # proposals -------------------------------------------------------------------------------
    def put_proposal(self, proposal: Proposal) -> bool:
        with self._changed:
            run, body = self._run(proposal.run), encode_packed(proposal)
            stored = self.get_proposal(proposal.run, proposal.id)
            if stored is not None and proposal.revision <= stored.revision:
                return run.proposals[proposal.id] == body
            run.proposals[proposal.id] = body
            for surplus in self._newest_proposals(proposal.run)[port.MAX_PROPOSALS :]:
                del run.proposals[surplus.id]
            return True

    def get_proposal(self, run: str, proposal: str) -> Proposal | None:
        with self._changed:
            body = self._look(run).proposals.get(proposal)
        return None if body is None else decode_packed(body, Proposal)

    def list_proposals(self, run: str, limit: int = port.MAX_PROPOSALS) -> list[Proposal]:
        with self._changed:
            return self._newest_proposals(run)[: max(limit, 0)]

    # commands --------------------------------------------------------------------------------
    def submit(self, run: str, command: Command, now: float) -> CommandResult:
        with self._changed:
            kept = self._run(run)
            if command.id in kept.submitted:
                first = kept.submitted[command.id]
                return result_of(command, **first._asdict(), duplicate=True)
            first = kept.submitted[command.id] = self._take(run, command, now)
            if first.code != "accepted":
                self._keep_note(AuditNote(run=run, code=first.code, asked=command))
            else:
                kept.num_commands += 1
                kept.commands[kept.num_commands] = encode_packed(command)
                _keep_newest(kept.commands, port.MAX_COMMANDS)
                self._changed.notify_all()
            return result_of(command, **first._asdict())

    def read_commands(
        self, run: str, after: str, count: int = 100, block_ms: int = 0
    ) -> list[tuple[str, Command | None]]:
        begin = int(after.partition("-")[0]) if after else 0
        raw = self._wait(
            lambda: [item for item in self._look(run).commands.items() if item[0] > begin][:count],
            block_ms,
        )
        return [
            (f"{number}-0", self._warned.decoded(body, Command, f"command {number} of {run}"))
            for number, body in raw
        ]

    def put_result(self, run: str, result: CommandResult) -> None:
        with self._changed:
            self._run(run).results[result.id] = encode_packed(result)

    def get_result(self, run: str, command: str) -> CommandResult | None:
        with self._changed:
            body = self._look(run).results.get(command)
        return None if body is None else decode_packed(body, CommandResult)

    # notes for the audit ---------------------------------------------------------------------
    def note(self, note: AuditNote) -> None:
        with self._changed:
            if note.asked.id not in self._noted:
                self._noted.add(note.asked.id)
                self._keep_note(note)

    def read_notes(self, after: int, count: int = 500) -> list[tuple[int, float, AuditNote | str]]:
        with self._changed:
            return [
                (place, at, note) for place, (at, note) in self._notes.items() if place > after
            ][:count]

    def acknowledge_notes(self, position: int) -> None:
        with self._changed:
            for place in [one for one in self._notes if one <= position]:
                del self._notes[place]

    # telling people --------------------------------------------------------------------------
    def put_notifier(self, state: NotifierState) -> None:
        self._notifier = encode_packed(state)

    def get_notifier(self) -> NotifierState | None:
        body = self._notifier
        return None if body is None else decode_packed(body, NotifierState)

    # inside ----------------------------------------------------------------------------------
    def _keep_note(self, note: AuditNote) -> None:
        self._num_notes += 1
        self._notes[self._num_notes] = (time.time(), note)
        _keep_newest(self._notes, port.MAX_NOTES)

    def _run(self, run: str) -> _Run:
        return self._runs.setdefault(run, _Run())

    def _look(self, run: str) -> _Run:
        """For reading: a run that nobody wrote stays unknown."""
        return self._runs.get(run) or _Run()

    def _updated_at(self, run: str) -> float:
        state = self.get_run(run)
        return 0.0 if state is None else state.updated_at

    def _entry(self, run: str, seq: int, body: bytes) -> JournalEntry | None:
        entry: JournalEntry | None = self._warned.decoded(
            body, JournalEntry, f"journal entry {seq} of {run}"
        )
        return entry

    def _newest_proposals(self, run: str) -> list[Proposal]:
        bodies = self._look(run).proposals.items()
        read = [self._warned.decoded(body, Proposal, f"proposal {name}") for name, body in bodies]
        known = [proposal for proposal in read if proposal is not None]
        return sorted(known, key=lambda proposal: (proposal.created_at, proposal.id), reverse=True)

    def _take(self, run: str, command: Command, now: float) -> _First:
        """Check a command, and change the proposal of an accepted decision."""
        if not isinstance(command, Decide):
            return _First("accepted", now)
        proposal, state = self.get_proposal(run, command.proposal), self.get_run(run)
        generation = 0 if state is None else state.generation
        code = judge(proposal, command, now=now, generation=generation)
        if proposal is None:
            return _First(code, now)
        if code == "accepted":
            self._run(run).proposals[proposal.id] = encode_packed(decided(proposal, command, now))
        why = detail(proposal, command, code)
        return _First(code, now, proposal.state, proposal.decided_by, why)

    def _wait(
        self, read: Callable[[], list[tuple[int, bytes]]], block_ms: int
    ) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []

        def has_some() -> bool:
            found[:] = read()
            return bool(found)

        with self._changed:
            self._changed.wait_for(has_some, min(block_ms, port.MAX_BLOCK_MS) / 1000)
        return found


def _updated(state: RunState) -> float:
    return state.updated_at


def _started(state: RunState) -> tuple[float, str]:
    return (state.started_at, state.run)


def _newest(held: dict[int, bytes], count: int) -> list[tuple[int, bytes]]:
    return list(held.items())[-count:] if count > 0 else []


def _keep_newest(held: dict[int, Any], count: int) -> None:
    while len(held) > count:
        del held[next(iter(held))]
