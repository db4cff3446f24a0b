"""The port to live state: what every backend does, and what callers may rely on.

A port is a folder, a backend is a leaf file: `storage.live.redis_store`, `storage.live.memory`. The
contract is written here once and one test suite (tests/contract) runs over every backend. Only the
edges open a backend. Every method raises `LiveStoreDown` when the store cannot be reached and
nothing was done (or it cannot be known), and `RecordError` for a single record that does not
decode; in a list such a record is left out with a warning. Neither loses anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from storage.audit import AuditNote
from storage.commands import Command, CommandResult
from storage.notifier_state import NotifierState
from storage.records import JournalEntry, Proposal, RackRecord, RunState

MAX_RUNS = 100
MAX_RACK_HISTORY = 600
MAX_PROPOSALS = 200
MAX_COMMANDS = 10_000
MAX_NOTES = 100_000
JOURNAL_TAIL = 5_000
MAX_BLOCK_MS = 2_000
RESULT_TTL_S = 24 * 3600


class LiveStoreDown(Exception):
    """The live store cannot be reached. The message says which address and what to try."""


class LiveStore(Protocol):
    """Live state of all runs. Keys are namespaced by run; everything is bounded.

    Streams keep what the recorder has not acknowledged (see `acknowledge`) and a short tail of the
    rest. All methods may be called from any thread.
    """

    def ping(self) -> None:
        """Return when the store answers."""

    def close(self) -> None:
        """Close what this object opened."""

    # runs ------------------------------------------------------------------------------------
    def put_run(self, state: RunState) -> None:
        """Replace the snapshot of a run; a state with an older `updated_at` or smaller generation
        is ignored. Beyond 100 runs the one that was quiet the longest is forgotten, once the
        recorder has its whole journal."""

    def get_run(self, run: str) -> RunState | None: ...

    def list_runs(self) -> list[RunState]:
        """All runs the store still knows (at most the newest 100), newest first."""

    # racks -----------------------------------------------------------------------------------
    def put_racks(self, records: Sequence[RackRecord]) -> None:
        """Replace the newest record of each rack and keep the last 600 of each as history (one per
        millisecond, ascending)."""

    def get_racks(self, run: str) -> dict[str, RackRecord]:
        """Newest record of every rack of a run, in one round trip."""

    def rack_history(self, run: str, rack: str, count: int = 300) -> list[RackRecord]:
        """The last `count` records of one rack, oldest first."""

    # journal ---------------------------------------------------------------------------------
    def append(self, run: str, entries: Sequence[JournalEntry], after: int | None = None) -> int:
        """Append entries in order; an entry whose seq is not above the last one is ignored (so a
        retry or a resend is harmless). Returns the last seq the store holds.

        after: the seq the caller believes the store holds. If it holds less (it was wiped, or a
        failover lost its last second), nothing is taken: resend from the returned seq. Without
        it, an append to a store that was just wiped leaves a gap that can never be filled.
        """

    def last_seq(self, run: str) -> int:
        """Seq of the newest journal entry the store holds, 0 when it knows none (or lost all)."""

    def list_journals(self) -> dict[str, tuple[int, int]]:
        """Every run that has a journal -> (last seq, acknowledged seq); also runs without a
        snapshot. The number of round trips does not grow with them."""

    def read_journal(
        self, run: str, after: int, count: int = 500, block_ms: int = 0
    ) -> list[JournalEntry]:
        """Entries with seq > `after`, ascending, at most `count`; waits up to `block_ms` (<= 2000)
        for one."""

    def read_journal_raw(
        self, run: str, after: int, count: int = 500, block_ms: int = 0
    ) -> list[tuple[int, bytes]]:
        """The same as (seq, encoded entry), for a reader that must account for each one, also
        those that do not decode."""

    def tail_journal(self, run: str, count: int) -> list[JournalEntry]:
        """The newest `count` entries, oldest first (fills a chart when a page opens)."""

    def acknowledge(self, run: str, seq: int) -> None:
        """The recorder has everything up to `seq` in SQL; the store may trim (it keeps a tail of
        5,000). A smaller seq than before is ignored."""

    def acknowledged(self, run: str) -> int:
        """The seq up to which the recorder has everything, 0 when it never said."""

    # proposals -------------------------------------------------------------------------------
    def put_proposal(self, proposal: Proposal) -> bool:
        """Write a proposal if its revision is above the stored one. False: it was not. (The very
        same proposal again gives True and changes nothing, so that a retry is harmless.)"""

    def get_proposal(self, run: str, proposal: str) -> Proposal | None: ...

    def list_proposals(self, run: str, limit: int = MAX_PROPOSALS) -> list[Proposal]:
        """The newest `limit` of the proposals kept for a run (the newest 200), newest first."""

    # commands --------------------------------------------------------------------------------
    def submit(self, run: str, command: Command, now: float) -> CommandResult:
        """Hand a command to the controller, atomically and at most once.

        The same command id again gives the first result with code "duplicate" and ok as it was. A
        `Decide` is checked in the same atomic step: the proposal exists ("unknown"), is open
        ("decided" / "expired" / "stale"), is not past expires_at by `now` ("expired"), matches
        generation and revision, and the run has not moved on to a later generation ("stale"); an
        approval is not barred, comes from somebody who may add one ("not_allowed") and names a
        feasible option ("invalid"; None is the recommended one). Then the proposal becomes
        approved or rejected (revision + 1, decided_by, decided_at, chosen), so that of any number
        of racing deciders exactly one wins; an approval that others must follow leaves it as it is,
        for the controller to count. ok with code "accepted" means: queued for the controller.
        """

    def read_commands(
        self, run: str, after: str, count: int = 100, block_ms: int = 0
    ) -> list[tuple[str, Command | None]]:
        """Commands after position `after` ("" = from the start), as (position, command); None for
        one that does not decode. The newest 10,000 are kept."""

    def put_result(self, run: str, result: CommandResult) -> None:
        """The controller's answer to a command (kept 24 hours)."""

    def get_result(self, run: str, command: str) -> CommandResult | None:
        """The controller's answer, None while there is none."""

    # notes for the audit ---------------------------------------------------------------------
    def note(self, note: AuditNote) -> None:
        """Keep what no controller hears of, for the recorder; the same command id counts once.
        `submit` notes what it refuses by itself. The newest 100,000 are kept."""

    def read_notes(self, after: int, count: int = 500) -> list[tuple[int, float, AuditNote | str]]:
        """Notes beyond a place, oldest first: place, when the store took it (epoch seconds), and
        the note, or words where it does not decode. Places grow with time, whatever is lost."""

    def acknowledge_notes(self, position: int) -> None:
        """The recorder has everything up to this place: forget it."""

    # telling people --------------------------------------------------------------------------
    def put_notifier(self, state: NotifierState) -> None:
        """Replace what the notifier says of itself."""

    def get_notifier(self) -> NotifierState | None:
        """What the notifier said last, None when it never ran."""
