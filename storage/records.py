"""The frozen records that runtime and app share: what goes through Redis and into SQL.

Encoding is msgspec: MessagePack in the stores (JSON has neither NaN nor infinity, and a diverged
loss must travel too), JSON for what a person reads; each envelope carries `schema`. Decoding
validates: a bad record raises `RecordError` and touches nothing. Times are seconds since the epoch
(float, UTC), durations `_s`, power `_w`, temperature `_c`, clocks `_mhz`.
This module must not know any backend.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from storage.audit_records import CommandAnswered
from storage.holdings import Holdings
from storage.policy_state import Approval, PolicyState

SCHEMA = 1

GpuState = Literal["healthy", "suspect", "degraded", "draining", "failed", "repairing"]
GPU_STATES: tuple[GpuState, ...] = (
    "healthy", "suspect", "degraded", "draining", "failed", "repairing",
)  # fmt: skip
RunStatus = Literal[
    "starting", "running", "reconfiguring", "waiting", "paused", "stopped", "failed"
]  # fmt: skip
ReplicaMode = Literal["training", "standby", "out"]
ActionKind = Literal["carry_on", "drop", "shrink", "shrink_boost", "grow", "replace", "restart"]
ProposalState = Literal[
    "open", "approved", "applying", "applied", "failed", "rejected", "expired", "stale"
]
Severity = Literal["info", "warning", "critical"]
Bucket = Literal[
    "productive", "degraded", "detecting", "reconfiguring", "recomputing",
    "checkpointing", "waiting_for_approval", "paused", "starting", "unknown",
]  # fmt: skip
BUCKETS: tuple[Bucket, ...] = (
    "productive", "degraded", "detecting", "reconfiguring", "recomputing",
    "checkpointing", "waiting_for_approval", "paused", "starting", "unknown",
)  # fmt: skip


class RecordError(Exception):
    """A record that cannot be decoded; says what was expected and what came."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: frozen, by keyword; fields added later get defaults."""


# ── live state ────────────────────────────────────────────────────────────────────────────────


class RackRecord(Record, frozen=True, kw_only=True):
    """One rack, one second: a column per quantity, one little-endian float32 per GPU slot.

    states: one byte per GPU, an index into `GPU_STATES`. step_s: the GPU's own compute share of
    the last step (emulated or measured), 0 when it does not train. emulated: pace, power and
    temperature come from a model, not a device. cap_w: 0 for a GPU that draws nothing; the others
    add up to at most budget_w. NaN where the device does not know a number. ecc: uncorrected ECC
    errors counted; b"" where no health source counts them. backend: who reads and
    sets caps ("emulated", "nvml", "nvml_read_only", "dry_run": none is really set, "absent").
    notice: what stands in the way of setting caps, with the fix, else what limits them; "" nothing.
    """

    run: str
    rack: str
    at: float
    emulated: bool
    budget_w: float
    normal_cap_w: float
    max_cap_w: float
    states: bytes
    power_w: bytes
    cap_w: bytes
    temp_c: bytes
    util: bytes
    clock_mhz: bytes
    step_s: bytes
    ecc: bytes = b""
    backend: str = ""
    notice: str = ""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        num_gpus = len(self.states)
        if num_gpus and max(self.states) >= len(GPU_STATES):
            raise ValueError(
                f"`states` has {max(self.states)}; allowed: 0 to {len(GPU_STATES) - 1}"
            )
        for name in ("power_w", "cap_w", "temp_c", "util", "clock_mhz", "step_s"):
            if len(getattr(self, name)) != 4 * num_gpus:
                raise ValueError(
                    f"`{name}` has {len(getattr(self, name))} bytes; "
                    f"expected one float32 for each of {num_gpus} GPUs"
                )
        if len(self.ecc) not in (0, 4 * num_gpus):
            raise ValueError(f"`ecc` has {len(self.ecc)} bytes; expected none or {4 * num_gpus}")

    def column(self, name: str) -> npt.NDArray[np.float32]:
        """Column `name` (for example "power_w") as float32 of shape (gpus,)."""
        if name == "ecc" and not self.ecc:
            return np.full(self.num_gpus, np.nan, "<f4")
        return np.frombuffer(getattr(self, name), dtype="<f4")

    def state_names(self) -> tuple[GpuState, ...]:
        return tuple(GPU_STATES[index] for index in self.states)

    @property
    def num_gpus(self) -> int:
        return len(self.states)


class ReplicaState(Record, frozen=True, kw_only=True):
    """One replica as it stands: its shape, share of the batch and pace.

    gpus: GPU id per slot. live: live slots. units: family -> number of units per slot (dead: 0);
    a shared one counts once. holdings: which units, None where each slot holds the next so many.
    step_s: the replica's own share of a step (its slowest slot), without waiting for the others.
    boost_w: watts above the normal cap of its most boosted GPU, 0 when none.
    boostable_failures: how many more failures power can make up for, -1 when not known.
    spares: GPUs of its rack that live, train nothing and can take a dead slot's place.
    """

    replica: int
    rack: str
    mode: ReplicaMode
    gpus: tuple[str, ...]
    live: tuple[int, ...]
    num_samples: int
    units: dict[str, tuple[int, ...]]
    step_s: float = 0.0
    boost_w: float = 0.0
    boostable_failures: int = -1
    spares: tuple[str, ...] = ()
    holdings: Holdings | None = None


class RunState(Record, frozen=True, kw_only=True):
    """The snapshot a dashboard tick reads: one record per run, rewritten on every change.

    step: optimizer steps committed. ideal_step_s: step time of the fully healthy run (baseline of
    goodput). ledger: bucket -> seconds, adds up to wall_s. policy: as shown in the header;
    policy_state: all of it. moved_bytes: of state between GPUs, to form the generation.
    """

    run: str
    name: str
    status: RunStatus
    emulated: bool
    device: str
    started_at: float
    updated_at: float
    generation: int
    step: int
    seq_len: int
    global_batch: int
    num_params: int
    replicas: tuple[ReplicaState, ...]
    ledger: dict[str, float]
    wall_s: float
    loss: float | None = None
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    ideal_step_s: float = 0.0
    time_goodput: float = 0.0
    token_goodput: float = 0.0
    status_reason: str = ""
    policy: str = "act with approval"
    policy_state: PolicyState | None = None
    moved_bytes: int = 0
    ended_at: float | None = None
    schema: int = SCHEMA


# ── journal: what must never be lost; numbered by the controller, ends in SQL ─────────────────


class RunStarted(Record, frozen=True, kw_only=True, tag="run_started"):
    """First entry of a run. config: the resolved configuration as JSON text. continues: run whose
    checkpoint it went on from at `first_step`, "" when it began afresh."""

    seq: int
    at: float
    run: str
    name: str
    emulated: bool
    device: str
    config: str
    seq_len: int
    global_batch: int
    num_params: int
    continues: str = ""
    first_step: int = 0


class RunEnded(Record, frozen=True, kw_only=True, tag="run_ended"):
    seq: int
    at: float
    run: str
    status: RunStatus
    reason: str


class GenerationFormed(Record, frozen=True, kw_only=True, tag="generation_formed"):
    """A generation committed its first step. replicas: the shape from `first_step` on."""

    seq: int
    at: float
    run: str
    generation: int
    first_step: int
    replicas: tuple[ReplicaState, ...]
    cause: str
    proposal: str = ""
    reconfigure_s: float = 0.0
    bytes_moved: int = 0


class StepCommitted(Record, frozen=True, kw_only=True, tag="step_committed"):
    """One optimizer step. samples: (replica, first sample index, count) of who trained what."""

    seq: int
    at: float
    run: str
    step: int
    generation: int
    loss: float
    grad_norm: float
    tokens: int
    step_s: float
    exposed_sync_s: float
    samples: tuple[tuple[int, int, int], ...]
    replica_step_s: tuple[float, ...]


class RunRolledBack(Record, frozen=True, kw_only=True, tag="run_rolled_back"):
    """The run went back to a checkpoint. Steps [step, committed) are not part of it any more: they
    are run again. generation: the last one that was lost with them; checkpoint: folder; reason:
    why, in words."""

    seq: int
    at: float
    run: str
    generation: int
    step: int
    committed: int
    checkpoint: str
    reason: str


class EventHappened(Record, frozen=True, kw_only=True, tag="event"):
    """Something that happened, in the past tense. kind: for example "gpu_failed",
    "replica_left_out", "replica_rejoined", "gpu_repaired", "generation_aborted", "cap_changed",
    "rank_fenced"; the recorder adds "bad_record" and "journal_gap"."""

    seq: int
    at: float
    run: str
    kind: str
    severity: Severity
    message: str
    generation: int = 0
    replica: int | None = None
    rack: str | None = None
    gpu: str | None = None
    details: dict[str, Any] = {}


class Option(Record, frozen=True, kw_only=True):
    """One thing the planner compared, with its predicted effect.

    shape: live slots per replica that would train ([] = left out). caps_w: GPU id -> cap where it
    differs from the normal cap. goodput: predicted token goodput while it stands (0..1).
    gpus: the GPU in every slot of the proposal's replica then, () as they are.
    cost_s: seconds the run pauses to get there. feasible False: `reason` says why not.
    """

    kind: ActionKind
    title: str
    shape: tuple[tuple[int, ...], ...]
    samples: tuple[int, ...]
    step_s: float
    tokens_per_s: float
    goodput: float
    cost_s: float
    risk: str
    caps_w: dict[str, float] = {}
    gpus: tuple[str, ...] = ()
    feasible: bool = True
    reason: str = ""


class Outcome(Record, frozen=True, kw_only=True):
    """What came of an applied proposal, measured: shown beside the prediction."""

    generation: int
    applied_at: float
    first_commit_s: float
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    goodput: float = 0.0
    num_steps: int = 0


class Proposal(Record, frozen=True, kw_only=True):
    """A recommended reconfiguration and its life. options[recommended] is the recommendation;
    the others are the alternatives. It can be approved only while `generation` stands.

    before: the shape when it was computed. evidence: what was seen, with times; older than
    evidence_max_age_s (0: any age will do) it carries no approval. revision grows with every
    change. chosen: index of the option that was approved. state_reason says why it is stale,
    rejected, failed. approvals_needed: different people who must approve the same option; decider:
    the least role that may. ruling: what policy says of it; barred: why nobody can approve it now,
    "" when they can. asked_by: who asked for it by hand. undoes: id of what it would take back.
    """

    id: str
    run: str
    generation: int
    revision: int
    created_at: float
    expires_at: float
    replica: int
    kind: ActionKind
    cause: str
    before: tuple[ReplicaState, ...]
    options: tuple[Option, ...]
    recommended: int
    state: ProposalState = "open"
    state_reason: str = ""
    evidence: tuple[tuple[float, str], ...] = ()
    chosen: int | None = None
    decided_by: str = ""
    decided_at: float | None = None
    auto_at: float | None = None
    outcome: Outcome | None = None
    approvals_needed: int = 1
    approvals: tuple[Approval, ...] = ()
    decider: str = "approver"
    ruling: str = ""
    barred: str = ""
    asked_by: str = ""
    undoes: str = ""
    evidence_max_age_s: float = 0.0
    schema: int = SCHEMA

    @property
    def is_final(self) -> bool:
        return self.state in ("applied", "failed", "rejected", "expired", "stale")

    @property
    def approvals_left(self) -> int:
        return max(0, self.approvals_needed - len(self.approvals))

    @property
    def evidence_at(self) -> float:
        """When its newest evidence was seen."""
        return max((at for at, _ in self.evidence), default=self.created_at)

    @property
    def progress(self) -> str:
        """`1 of 2 approvals, by ana`; "" where one is enough."""
        if self.approvals_needed < 2:
            return ""
        by = ", ".join(one.who for one in self.approvals)
        text = f"{len(self.approvals)} of {self.approvals_needed} approvals"
        return f"{text}, by {by}" if by else text

    @property
    def cannot_approve(self) -> tuple[str, ...]:
        """Who cannot add an approval to it: two people are two people."""
        asked = (self.asked_by,) if self.approvals_needed > 1 and self.asked_by else ()
        return (*asked, *(one.who for one in self.approvals))

    def no_second(self, who: str) -> str:
        """Why `who` cannot add an approval to it, "" when they can."""
        if who not in self.cannot_approve:
            return ""
        if any(one.who == who for one in self.approvals):
            return f"{who} has approved it already; another person must"
        return f"{who} asked for it and cannot approve it too; other people must"


class ProposalChanged(Record, frozen=True, kw_only=True, tag="proposal_changed"):
    seq: int
    at: float
    run: str
    proposal: Proposal


class DecisionMade(Record, frozen=True, kw_only=True, tag="decision_made"):
    """An answer to a proposal. id is the command id, so it counts once. via: "browser", "cli",
    "policy". approved_in_part: an approval that alone is not enough."""

    seq: int
    at: float
    run: str
    id: str
    proposal: str
    generation: int
    verdict: Literal["approved", "approved_in_part", "rejected"]
    option: int | None
    who: str
    via: str
    reason: str


class LedgerSpent(Record, frozen=True, kw_only=True, tag="ledger_spent"):
    """Wall time attributed to one bucket: [begin, end). Intervals of a run never overlap or gap;
    together they add up to the run's wall time."""

    seq: int
    at: float
    run: str
    bucket: Bucket
    begin: float
    end: float
    tokens: int = 0


JournalEntry = (
    RunStarted
    | RunEnded
    | GenerationFormed
    | StepCommitted
    | RunRolledBack
    | EventHappened
    | ProposalChanged
    | DecisionMade
    | LedgerSpent
    | CommandAnswered
)


# ── encoding ──────────────────────────────────────────────────────────────────────────────────


def _plain(value: object) -> object:
    """numpy scalars, which msgspec does not know, as the Python numbers they are."""
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError


def encode_json(record: Any) -> bytes:
    """JSON bytes of a record, with stable key order. NaN and infinity become null."""
    return msgspec.json.encode(record, enc_hook=_plain, order="deterministic")


def decode_json(data: bytes | str, kind: Any) -> Any:
    """Decode and validate `data` as `kind` (a record type or union).

    Raises:
        RecordError: not valid JSON, or not a valid `kind`; names the field.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"bad record: {error}") from error


def encode_packed(record: Any) -> bytes:
    """MessagePack bytes of a record: columns stay raw bytes, NaN and infinity survive."""
    return msgspec.msgpack.encode(record, enc_hook=_plain)


def decode_packed(data: bytes, kind: Any) -> Any:
    """Decode and validate packed bytes as `kind` (a record type or union).

    Raises:
        RecordError: not MessagePack, or not a valid `kind`.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"bad packed record: {error}") from error
