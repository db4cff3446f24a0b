"""The tables of the history.

Times are epoch seconds in double precision, as in the records: both databases return them exactly,
numpy takes them as they are, and no naive datetime can slip in (SQLite has no time zones). What
comes from the journal is keyed by (run, seq), so that recording an entry again changes nothing.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

# Constraints need names, or a later migration cannot alter them
METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _key(*, second: str = "seq") -> tuple[Column[str], Column[int]]:
    return (
        Column("run", Text, primary_key=True),
        Column(second, BigInteger, primary_key=True, autoincrement=False),
    )


def _committed() -> tuple[Column[Any], ...]:
    """What a committed step was. loss and the like are NULL where they were not a number; samples,
    replica_step_s: JSON."""
    return (
        Column("at", Double, nullable=False),
        Column("generation", Integer, nullable=False),
        Column("loss", Double),
        Column("grad_norm", Double),
        Column("tokens", BigInteger, nullable=False),
        Column("step_s", Double),
        Column("exposed_sync_s", Double),
        Column("samples", Text, nullable=False),
        Column("replica_step_s", Text, nullable=False),
    )


# One row per run. The sums (num_steps, tokens, ...) are kept by the recorder in the transaction
# that writes the rows they count, so that a list of runs does not read millions of steps.
RUNS = Table(
    "runs",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("status_reason", Text, nullable=False),
    Column("emulated", Boolean, nullable=False),
    Column("device", Text, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("last_at", Double, nullable=False),
    Column("config", Text, nullable=False),
    Column("seq_len", Integer, nullable=False),
    Column("global_batch", Integer, nullable=False),
    Column("num_params", BigInteger, nullable=False),
    Column("num_steps", BigInteger, nullable=False),
    Column("last_step", BigInteger),
    Column("last_loss", Double),
    Column("tokens", BigInteger, nullable=False),
    Column("num_generations", Integer, nullable=False),
    Column("num_bad_records", Integer, nullable=False),
    Column("num_missing", BigInteger, nullable=False),
    Index(None, "started_at"),
)

# The seq up to which a run's journal is in these tables; written with the rows it covers.
POSITIONS = Table(
    "positions",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("recorded_at", Double, nullable=False),
)

# shape: live slots per replica as JSON, for people. body: the record, packed.
GENERATIONS = Table(
    "generations",
    METADATA,
    *_key(),
    Column("at", Double, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("cause", Text, nullable=False),
    Column("proposal", Text, nullable=False),
    Column("reconfigure_s", Double),
    Column("bytes_moved", BigInteger, nullable=False),
    Column("shape", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

# Keyed by step: one that was committed again after a failure replaces its row.
STEPS = Table(
    "steps",
    METADATA,
    *_key(second="step"),
    Column("seq", BigInteger, nullable=False),
    *_committed(),
)

# Steps that a run lost when it went back to a checkpoint, as they stood in `steps`: no part of its
# line any more, and never thinned. rolled_back_seq: of the entry that says so.
SUPERSEDED_STEPS = Table(
    "superseded_steps",
    METADATA,
    *_key(),
    Column("step", BigInteger, nullable=False),
    *_committed(),
    Column("rolled_back_seq", BigInteger, nullable=False),
    Index(None, "run", "step"),
)

EVENTS = Table(
    "events",
    METADATA,
    *_key(),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),
    Column("severity", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("replica", Integer),
    Column("rack", Text),
    Column("gpu", Text),
    Column("details", Text, nullable=False),
)

# Every change of a proposal. body: the record, packed.
PROPOSALS = Table(
    "proposals",
    METADATA,
    *_key(),
    Column("at", Double, nullable=False),
    Column("id", Text, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("replica", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("state_reason", Text, nullable=False),
    Column("decided_by", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index(None, "run", "id", "revision"),
)

DECISIONS = Table(
    "decisions",
    METADATA,
    *_key(),
    Column("at", Double, nullable=False),
    Column("id", Text, nullable=False),
    Column("proposal", Text, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("verdict", Text, nullable=False),
    Column("option", Integer),
    Column("who", Text, nullable=False),
    Column("via", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Index(None, "run", "id"),
)

LEDGER = Table(
    "ledger",
    METADATA,
    *_key(),
    Column("at", Double, nullable=False),
    Column("bucket", Text, nullable=False),
    Column("begin_at", Double, nullable=False),
    Column("end_at", Double, nullable=False),
    Column("tokens", BigInteger, nullable=False),
)

# Sums over `ledger`, kept by the recorder.
LEDGER_TOTALS = Table(
    "ledger_totals",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("bucket", Text, primary_key=True),
    Column("spent_s", Double, nullable=False),
    Column("tokens", BigInteger, nullable=False),
)

# Steps added up per minute (span_s 60) and hour (3600) by generation; kept by the recorder with the
# steps. begin: epoch seconds. loss_sum: over the num_losses that were numbers.
ROLLUPS = Table(
    "rollups",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("span_s", Integer, primary_key=True, autoincrement=False),
    Column("begin", BigInteger, primary_key=True, autoincrement=False),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("num_steps", BigInteger, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("step_s", Double, nullable=False),
    Column("exposed_sync_s", Double, nullable=False),
    Column("num_losses", BigInteger, nullable=False),
    Column("loss_sum", Double, nullable=False),
)

# What people wrote about a run. id: minted where it was written, so that it counts once.
NOTES = Table(
    "notes",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("at", Double, nullable=False),
    Column("who", Text, nullable=False),
    Column("text", Text, nullable=False),
)

TAGS = Table(
    "tags",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("tag", Text, primary_key=True),
    Column("at", Double, nullable=False),
    Column("who", Text, nullable=False),
    Index(None, "tag"),
)

# One chain of hashes over all runs; triggers refuse every change (migration v3). run, seq: place in
# the run's journal, or among the notes ("").
AUDIT = Table(
    "audit",
    METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("previous", Text, nullable=False),
    Column("run", Text, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("id", Text, nullable=False),
    Column("who", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("via", Text, nullable=False),
    Column("what", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("result", Text, nullable=False),
    Column("hash", Text, nullable=False),
    UniqueConstraint("run", "seq"),
)

# Entries that did not decode, as they came (at most the first 64 KiB).
BAD_RECORDS = Table(
    "bad_records",
    METADATA,
    *_key(),
    Column("at", Double, nullable=False),
    Column("error", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
)
