"""What controller, agents and workers say to each other: frozen, tagged, validated on arrival.

Worker messages pass through the agent unchanged; an agent keeps them while its controller is away.
Times are seconds since the epoch on the sender's clock.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec

from runtime.errors import CounterpoiseError
from runtime.health.observation import Observation
from runtime.health.sources.port import SourceStatus
from runtime.plan.generation import GenerationPlan, Standing
from runtime.plan.manifest import Part
from runtime.power.host import PowerOffer
from runtime.power.rack_caps import CapBatch
from storage.records import GpuState


class MessageError(CounterpoiseError):
    """A message that does not decode; the connection that sent it is closed."""


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages."""


# ── from a worker ─────────────────────────────────────────────────────────────────────────────


class WorkerReady(_Message, frozen=True, kw_only=True, tag="worker_ready"):
    """The process is up and waits for a generation."""

    gpu: str
    pid: int


class Pulse(_Message, frozen=True, kw_only=True, tag="pulse"):
    """Progress, not just life: what the training thread does, and since when it has not come to the
    end of a step."""

    gpu: str
    generation: int
    phase: str
    phase_age_s: float


class Entered(_Message, frozen=True, kw_only=True, tag="entered"):
    """This rank has formed its groups, agreed on the digest and holds its units."""

    gpu: str
    generation: int
    seconds: float
    bytes_received: int


class NotFiniteSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Where values that are not finite came up first. gpus: () if nobody saw. again: twice."""

    gpus: tuple[str, ...]
    where: str
    again: bool


class StatesDiffer(msgspec.Struct, frozen=True, kw_only=True):
    """Holders that do not hold the same. units: some of what differs, in words. odd: GPU ids that
    a majority stands against; unsure: the holders of what no majority settles."""

    units: tuple[str, ...]
    odd: tuple[str, ...]
    unsure: tuple[str, ...]


class StepDone(_Message, frozen=True, kw_only=True, tag="step_done"):
    """A committed step, told by world rank 0 of the generation.

    loss: None when it is no number. grad_norm: NOT_FINITE of a step that was skipped; it then has
    no tokens. share_s: seconds that each world rank's own share of the step took, in rank order.
    """

    gpu: str
    generation: int
    step: int
    at: float
    loss: float | None
    grad_norm: float
    tokens: int
    step_s: float
    exposed_sync_s: float
    share_s: tuple[float, ...]
    not_finite: NotFiniteSeen | None = None
    difference: StatesDiffer | None = None


class StepRefused(_Message, frozen=True, kw_only=True, tag="step_refused"):
    """Every rank has left before `step`, which is not finite; each tells it, then parks."""

    gpu: str
    generation: int
    step: int
    seen: NotFiniteSeen


class Parked(_Message, frozen=True, kw_only=True, tag="parked"):
    """The rank has left the generation. last: its last committed step, told again in case the
    rank that should have told it is gone."""

    gpu: str
    generation: int
    standing: Standing
    last: StepDone | None = None


class Copied(_Message, frozen=True, kw_only=True, tag="copied"):
    """This rank's state after `step` steps is copied, which held up its training for `seconds`."""

    gpu: str
    step: int
    seconds: float


class Saved(_Message, frozen=True, kw_only=True, tag="saved"):
    """This rank's part of the checkpoint in `folder` is on disk; `error` says why it is not."""

    gpu: str
    part: Part | None = None
    error: str = ""
    folder: str = ""


class CheckpointRefused(_Message, frozen=True, kw_only=True, tag="checkpoint_refused"):
    """The checkpoint that `generation` begins at cannot be read or trusted on this rank."""

    gpu: str
    generation: int
    reason: str


class WorkerFailed(_Message, frozen=True, kw_only=True, tag="worker_failed"):
    """The worker met an error it cannot go on from; it exits right after."""

    gpu: str
    reason: str


# ── from an agent ─────────────────────────────────────────────────────────────────────────────


class AgentHello(_Message, frozen=True, kw_only=True, tag="agent_hello"):
    """First message of every connection. workers: GPU id -> pid of the workers alive now. power:
    what the host's devices allow."""

    host: str
    pid: int
    gpus: tuple[str, ...]
    workers: dict[str, int]
    power: PowerOffer | None = None


class CapsSet(_Message, frozen=True, kw_only=True, tag="caps_set"):
    """Caps that were set on a rack, or refused. (epoch, number) grows with every one of a host; an
    agent tells those again that its controller may have missed."""

    host: str
    epoch: int
    number: int
    batch: CapBatch


class CapsReturned(_Message, frozen=True, kw_only=True, tag="caps_returned"):
    """The caps of a host are as they were found, as far as its racks' budgets allow."""

    host: str


class Observed(_Message, frozen=True, kw_only=True, tag="observed"):
    """What a health source of a host saw. id: told again after a gap, it counts once."""

    host: str
    id: str
    observation: Observation


class SourceChanged(_Message, frozen=True, kw_only=True, tag="source_changed"):
    """A health source of a host began to watch, or does not: missing, denied, failing, and why."""

    host: str
    source: str
    status: SourceStatus
    reason: str


class WorkerExited(_Message, frozen=True, kw_only=True, tag="worker_exited"):
    """A worker process is gone. code: exit code, negative for a signal."""

    gpu: str
    pid: int
    code: int
    at: float


# ── to an agent ───────────────────────────────────────────────────────────────────────────────


class StartWorkers(_Message, frozen=True, kw_only=True, tag="start_workers"):
    """Start a worker on each GPU. store: (host, port) of the rendezvous, to connect to at once."""

    gpus: tuple[str, ...]
    store: tuple[str, int]


class KillWorker(_Message, frozen=True, kw_only=True, tag="kill_worker"):
    """Fence a worker (SIGKILL), or stop it in its tracks (SIGSTOP) to inject a hang.

    pid: only if it still is this process; 0 for any."""

    gpu: str
    how: Literal["kill", "hang"] = "kill"
    pid: int = 0


class CorruptState(_Message, frozen=True, kw_only=True, tag="corrupt_state"):
    """Inject a silent fault: before its next step the worker flips a bit of what it holds."""

    gpu: str


class SetDevice(_Message, frozen=True, kw_only=True, tag="set_device"):
    """Wished power caps in watts (0: trains nothing) and injected slowness (1.0: none) by GPU id,
    budgets in watts by rack; why and by whom, for the journal of caps. Budgets come first."""

    caps_w: dict[str, float] = {}
    slowness: dict[str, float] = {}
    budgets_w: dict[str, float] = {}
    cause: str = ""
    by: str = "controller"


class SetVerdicts(_Message, frozen=True, kw_only=True, tag="set_verdicts"):
    """GPU id -> its state by the controller's verdict, to be shown."""

    states: dict[str, GpuState]


class EnterGeneration(_Message, frozen=True, kw_only=True, tag="enter_generation"):
    plan: GenerationPlan


class LeaveGeneration(_Message, frozen=True, kw_only=True, tag="leave_generation"):
    """Leave `generation`: at the next step boundary, or at once when `abort`."""

    generation: int
    abort: bool


class Save(_Message, frozen=True, kw_only=True, tag="save"):
    """Members of `generation`: write your part of a checkpoint into `folder`, a folder that every
    rank of the run sees. step: copy at the boundary after so many steps and train on; 0: now, you
    have left."""

    generation: int
    folder: str
    step: int = 0


class ReturnCaps(_Message, frozen=True, kw_only=True, tag="return_caps"):
    """Give every GPU back the cap it was found with, and answer `CapsReturned`."""


class Quit(_Message, frozen=True, kw_only=True, tag="quit"):
    """End every worker and then yourself."""


class DeviceSpeed(_Message, frozen=True, kw_only=True, tag="device_speed"):
    """Agent to worker: speed of its (emulated) device; 1.0 is healthy at the normal cap."""

    speed: float


FromWorker = (
    WorkerReady
    | Pulse
    | Entered
    | StepDone
    | StepRefused
    | Parked
    | Copied
    | Saved
    | CheckpointRefused
    | WorkerFailed
)
FromAgent = (
    FromWorker | AgentHello | CapsSet | CapsReturned | Observed | SourceChanged | WorkerExited
)
ToWorker = EnterGeneration | LeaveGeneration | DeviceSpeed | Save | CorruptState | Quit
ToAgent = (
    StartWorkers
    | KillWorker
    | CorruptState
    | SetDevice
    | SetVerdicts
    | EnterGeneration
    | LeaveGeneration
    | Save
    | ReturnCaps
    | Quit
)


def encode(message: _Message) -> bytes:
    return msgspec.json.encode(message)


def decode_from_worker(data: bytes) -> FromWorker:
    return cast(FromWorker, _decode(data, FromWorker))


def decode_from_agent(data: bytes) -> FromAgent:
    return cast(FromAgent, _decode(data, FromAgent))


def decode_to_agent(data: bytes) -> ToAgent:
    return cast(ToAgent, _decode(data, ToAgent))


def decode_to_worker(data: bytes) -> ToWorker:
    return cast(ToWorker, _decode(data, ToWorker))


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"bad message: {error}") from error
