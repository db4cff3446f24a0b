"""The live store on Redis or Valkey, 7.0 or later: the leaf behind `storage.live.port.LiveStore`.

Whatever must be atomic is a script in scripts/. Every write is idempotent by seq, revision, time or
command id, because a lost reply makes the client send it again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from storage.audit import AuditNote, Noted
from storage.commands import Command, CommandResult, Decide
from storage.live import port
from storage.live.link import Argument, RedisLink
from storage.live.proposal_fields import from_fields, to_fields
from storage.live.verdict import result_of
from storage.live.warned import Warned
from storage.notifier_state import NotifierState
from storage.records import (
    JournalEntry,
    Proposal,
    RackRecord,
    RecordError,
    RunState,
    decode_packed,
    encode_packed,
)

_LOG = logging.getLogger(__name__)
_PREFIX = "cp:run:"
_RUNS = "cp:runs"
_JOURNALS = "cp:journals"
_NOTIFIER = "cp:notifier"
_NOTES = "cp:notes"
# A note's place is its id in one number: milliseconds, then its number among those of one
_NOTE_BITS = 20
_NOTE_MASK = (1 << _NOTE_BITS) - 1
_RACKS_PER_CALL = 64
_ENTRIES_PER_CALL = 200


def _key(run: str, *parts: str) -> str:
    return ":".join((f"{_PREFIX}{run}", *parts))


class RedisStore:
    """See `LiveStore` for what each method promises.

    Args:
        url: redis://, rediss:// or unix:// address.
        timeout_s: longest wait for a connection, and for a reply beyond a block.
        num_retries: how often a command whose reply was lost is sent again.
    """

    def __init__(self, url: str, *, timeout_s: float = 3.0, num_retries: int = 2) -> None:
        # A blocking read must be answered before the socket gives up
        self._max_block_ms = min(port.MAX_BLOCK_MS, int(timeout_s * 500))
        self._link = RedisLink(url, timeout_s=timeout_s, num_retries=num_retries)
        self._warned = Warned(_LOG)

    @classmethod
    def for_service(cls, url: str) -> RedisStore:
        """For controller and recorder: rides out a short interruption by itself."""
        return cls(url, timeout_s=3.0, num_retries=2)

    @classmethod
    def for_ui(cls, url: str) -> RedisStore:
        """For what a person waits for: says within a second that the store is away."""
        return cls(url, timeout_s=0.8, num_retries=0)

    @property
    def address(self) -> str:
        """The address without its password."""
        return self._link.address

    def ping(self) -> None:
        self._link.execute("PING")

    def close(self) -> None:
        self._link.close()

    # runs ------------------------------------------------------------------------------------
    def put_run(self, state: RunState) -> None:
        run = state.run
        surplus = self._link.script(
            "put_run",
            [_RUNS, _key(run, "state")],
            [run, encode_packed(state), repr(state.updated_at), state.generation, port.MAX_RUNS],
        )
        for quiet in surplus:
            self._drop_run(quiet.decode())

    def get_run(self, run: str) -> RunState | None:
        body = self._link.execute("HGET", _key(run, "state"), "body")
        return None if body is None else decode_packed(body, RunState)

    def list_runs(self) -> list[RunState]:
        names = self._link.execute("ZREVRANGE", _RUNS, 0, port.MAX_RUNS - 1)
        bodies = self._read_all(("HGET", _key(name.decode(), "state"), "body") for name in names)
        states = [
            self._warned.decoded(body, RunState, f"run {name.decode()}")
            for name, body in zip(names, bodies, strict=True)
            if body is not None
        ]
        return sorted((s for s in states if s is not None), key=_started, reverse=True)

    # racks -----------------------------------------------------------------------------------
    def put_racks(self, records: Sequence[RackRecord]) -> None:
        by_run: dict[str, list[RackRecord]] = defaultdict(list)
        for record in records:
            by_run[record.run].append(record)
        for run, racks in by_run.items():
            for begin in range(0, len(racks), _RACKS_PER_CALL):
                self._put_racks(run, racks[begin : begin + _RACKS_PER_CALL])

    def get_racks(self, run: str) -> dict[str, RackRecord]:
        flat = self._link.execute("HGETALL", _key(run, "racks"))
        racks = {
            name.decode(): self._warned.decoded(body, RackRecord, f"rack {name.decode()}")
            for name, body in sorted(flat.items())
        }
        return {name: record for name, record in racks.items() if record is not None}

    def rack_history(self, run: str, rack: str, count: int = 300) -> list[RackRecord]:
        count = min(count, port.MAX_RACK_HISTORY)
        entries = self._newest(_key(run, "rack", rack), count)
        records = [self._warned.decoded(body, RackRecord, f"rack {rack}") for _, body in entries]
        return [record for record in records if record is not None]

    # journal ---------------------------------------------------------------------------------
    def append(self, run: str, entries: Sequence[JournalEntry], after: int | None = None) -> int:
        keys = [_key(run, "journal"), _JOURNALS]
        last = after
        for begin in range(0, len(entries), _ENTRIES_PER_CALL):
            arguments: list[Argument] = [run, "" if after is None else after]
            for entry in entries[begin : begin + _ENTRIES_PER_CALL]:
                arguments += [entry.seq, encode_packed(entry)]
            last = int(self._link.script("append", keys, arguments))
            if after is not None:
                if last < after:
                    return last
                after = last
        return self.last_seq(run) if last is None else last

    def last_seq(self, run: str) -> int:
        newest = self._newest(_key(run, "journal"), 1)
        return newest[0][0] if newest else 0

    def list_journals(self) -> dict[str, tuple[int, int]]:
        # No script: whoever may only read may ask this
        runs = sorted(run.decode() for run in self._link.execute("SMEMBERS", _JOURNALS))
        newest = self._read_all(
            ("XREVRANGE", _key(run, "journal"), "+", "-", "COUNT", 1) for run in runs
        )
        acknowledged = self._read_all(("GET", _key(run, "ack")) for run in runs)
        return {
            run: (_seq(top[0][0].decode()) if top else 0, int(seq or 0))
            for run, top, seq in zip(runs, newest, acknowledged, strict=True)
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
        entries = self._after(_key(run, "journal"), f"{after}-0", count, block_ms)
        return [(_seq(position), body) for position, body in entries]

    def tail_journal(self, run: str, count: int) -> list[JournalEntry]:
        newest = self._newest(_key(run, "journal"), min(count, port.JOURNAL_TAIL))
        entries = [self._entry(run, seq, body) for seq, body in newest]
        return [entry for entry in entries if entry is not None]

    def acknowledge(self, run: str, seq: int) -> None:
        keys = [_key(run, "journal"), _key(run, "ack")]
        self._link.script("acknowledge", keys, [seq, port.JOURNAL_TAIL])

    def acknowledged(self, run: str) -> int:
        return int(self._link.execute("GET", _key(run, "ack")) or 0)

    # proposals -------------------------------------------------------------------------------
    def put_proposal(self, proposal: Proposal) -> bool:
        run = proposal.run
        arguments: list[Argument] = [
            proposal.id,
            repr(float(proposal.created_at)),
            proposal.revision,
            port.MAX_PROPOSALS,
            _key(run, "proposal", ""),
        ]
        for name, value in to_fields(proposal).items():
            arguments += [name, value]
        keys = [_key(run, "proposal", proposal.id), _key(run, "proposals")]
        return bool(self._link.script("put_proposal", keys, arguments))

    def get_proposal(self, run: str, proposal: str) -> Proposal | None:
        fields = self._link.execute("HGETALL", _key(run, "proposal", proposal))
        return from_fields(fields) if fields else None

    def list_proposals(self, run: str, limit: int = port.MAX_PROPOSALS) -> list[Proposal]:
        if limit < 1:
            return []
        names = self._link.execute("ZREVRANGE", _key(run, "proposals"), 0, limit - 1)
        hashes = self._read_all(("HGETALL", _key(run, "proposal", name.decode())) for name in names)
        proposals = [
            self._warned.attempt(partial(from_fields, fields), f"proposal {name.decode()}")
            for name, fields in zip(names, hashes, strict=True)
            if fields
        ]
        return [proposal for proposal in proposals if proposal is not None]

    # commands --------------------------------------------------------------------------------
    def submit(self, run: str, command: Command, now: float) -> CommandResult:
        keys = [_key(run, "submitted", command.id), _key(run, "commands")]
        arguments: list[Argument] = [
            encode_packed(command),
            repr(float(now)),
            port.RESULT_TTL_S,
            port.MAX_COMMANDS,
        ]
        if isinstance(command, Decide):
            keys += [_key(run, "proposal", command.proposal), _NOTES]
            arguments += ["decide", command.generation, command.revision, command.verdict]
            arguments += ["" if command.option is None else command.option]
            arguments += [command.who, command.reason, run, port.MAX_NOTES, _key(run, "state")]
        else:
            arguments.append("")
        duplicate, code, state, by, at, why = self._link.script("submit", keys, arguments)
        return result_of(
            command,
            code.decode(),
            at=float(at),
            state=state.decode(),
            by=by.decode(),
            why=why.decode(),
            duplicate=bool(duplicate),
        )

    def read_commands(
        self, run: str, after: str, count: int = 100, block_ms: int = 0
    ) -> list[tuple[str, Command | None]]:
        entries = self._after(_key(run, "commands"), after or "0-0", count, block_ms)
        return [
            (position, self._warned.decoded(body, Command, f"command {position} of {run}"))
            for position, body in entries
        ]

    def put_result(self, run: str, result: CommandResult) -> None:
        key = _key(run, "result", result.id)
        self._link.execute("SET", key, encode_packed(result), "EX", port.RESULT_TTL_S)

    def get_result(self, run: str, command: str) -> CommandResult | None:
        body = self._link.execute("GET", _key(run, "result", command))
        return None if body is None else decode_packed(body, CommandResult)

    # telling people --------------------------------------------------------------------------
    def put_notifier(self, state: NotifierState) -> None:
        self._link.execute("SET", _NOTIFIER, encode_packed(state))

    def get_notifier(self) -> NotifierState | None:
        body = self._link.execute("GET", _NOTIFIER)
        return None if body is None else decode_packed(body, NotifierState)

    # notes for the audit ---------------------------------------------------------------------
    def note(self, note: AuditNote) -> None:
        body = encode_packed(note.asked)
        keys = [f"cp:noted:{note.asked.id}", _NOTES]
        self._link.script(
            "note", keys, [body, note.run, note.code, port.MAX_NOTES, port.RESULT_TTL_S]
        )

    def read_notes(self, after: int, count: int = 500) -> list[tuple[int, float, AuditNote | str]]:
        begin = "-" if after <= 0 else f"({after >> _NOTE_BITS}-{after & _NOTE_MASK}"
        entries = self._link.execute("XRANGE", _NOTES, begin, "+", "COUNT", count)
        return [_noted(position.decode(), fields) for position, fields in entries]

    def acknowledge_notes(self, position: int) -> None:
        begin = f"{position >> _NOTE_BITS}-{(position & _NOTE_MASK) + 1}"
        self._link.execute("XTRIM", _NOTES, "MINID", begin)

    # inside ----------------------------------------------------------------------------------
    def _read_all(self, commands: Any) -> list[Any]:
        listed = list(commands)
        return self._link.pipeline(listed) if listed else []

    def _entry(self, run: str, seq: int, body: bytes) -> JournalEntry | None:
        entry: JournalEntry | None = self._warned.decoded(
            body, JournalEntry, f"journal entry {seq} of {run}"
        )
        return entry

    def _newest(self, key: str, count: int) -> list[tuple[int, bytes]]:
        """The newest entries of a stream, oldest first, as (first half of the id, body)."""
        if count < 1:
            return []
        entries = self._link.execute("XREVRANGE", key, "+", "-", "COUNT", count)
        return [(_seq(position.decode()), _body(fields)) for position, fields in reversed(entries)]

    def _after(self, key: str, after: str, count: int, block_ms: int) -> list[tuple[str, bytes]]:
        # BLOCK 0 would wait for ever
        block_ms = min(block_ms, self._max_block_ms)
        block: list[Argument] = ["BLOCK", block_ms] if block_ms > 0 else []
        reply = self._link.execute("XREAD", "COUNT", count, *block, "STREAMS", key, after)
        if not reply:
            return []
        return [(position.decode(), _body(fields)) for position, fields in reply[0][1]]

    def _put_racks(self, run: str, racks: Sequence[RackRecord]) -> None:
        keys = [_key(run, "racks"), *(_key(run, "rack", record.rack) for record in racks)]
        arguments: list[Argument] = [port.MAX_RACK_HISTORY]
        for record in racks:
            at_ms = max(1, int(record.at * 1000))
            arguments += [record.rack, at_ms, encode_packed(record)]
        self._link.script("put_racks", keys, arguments)

    def _drop_run(self, run: str) -> None:
        parts = ("journal", "ack", "racks", "proposals", "state", "commands")
        self._link.script(
            "drop_run",
            [_RUNS, _JOURNALS, *(_key(run, part) for part in parts)],
            [run, _key(run, "rack", ""), _key(run, "proposal", "")],
        )


def _started(state: RunState) -> tuple[float, str]:
    return (state.started_at, state.run)


def _seq(position: str) -> int:
    return int(position.partition("-")[0])


def _noted(position: str, fields: Any) -> tuple[int, float, AuditNote | str]:
    ms, _, number = position.partition("-")
    place, at = (int(ms) << _NOTE_BITS) + int(number), int(ms) / 1000
    try:
        asked = decode_packed(_body(fields), Noted)
        run, code = (fields[name].decode() for name in (b"r", b"c"))
    except (RecordError, KeyError, UnicodeDecodeError) as error:
        return place, at, f"note {position}: {error}"
    return place, at, AuditNote(run=run, code=code, asked=asked)


def _body(fields: Any) -> bytes:
    """The one field of an entry; b"" (which does not decode) for a foreign entry."""
    body = fields.get(b"d", b"") if isinstance(fields, dict) else b""
    return bytes(body)
