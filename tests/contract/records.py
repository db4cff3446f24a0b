"""Records for the contract tests: complete and valid, each field changeable by keyword."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from storage.commands import Decide, Stop
from storage.policy_state import Approval
from storage.records import (
    DecisionMade,
    EventHappened,
    GenerationFormed,
    JournalEntry,
    LedgerSpent,
    Option,
    Proposal,
    ProposalChanged,
    RackRecord,
    ReplicaState,
    RunEnded,
    RunStarted,
    RunState,
    StepCommitted,
)

RUN = "run-1"


def _made(base: Any, changes: dict[str, Any]) -> Any:
    return msgspec.structs.replace(base, **changes)


def replica_state(**changes: Any) -> ReplicaState:
    base = ReplicaState(
        replica=0, rack="rack-0", mode="training", gpus=("rack-0/0", "rack-0/1"), live=(0, 1),
        num_samples=8, units={"heads": (8, 8), "mlp": (22, 21)}, step_s=0.93,
    )  # fmt: skip
    return _made(base, changes)


def run_state(**changes: Any) -> RunState:
    base = RunState(
        run=RUN, name="demo", status="running", emulated=True, device="emulated", started_at=100.0,
        updated_at=200.25, generation=3, step=41, seq_len=64, global_batch=16, num_params=500_000,
        replicas=(replica_state(),), ledger={"productive": 90.5, "starting": 9.75}, wall_s=100.25,
        loss=2.5,
    )  # fmt: skip
    return _made(base, changes)


def rack(name: str = "rack-0", *, gpus: int = 8, **changes: Any) -> RackRecord:
    column = np.linspace(0.0, 1.0, gpus, dtype="<f4").tobytes()
    base = RackRecord(
        run=RUN, rack=name, at=100.0, emulated=True, budget_w=9000.0, normal_cap_w=1000.0,
        max_cap_w=1300.0, states=bytes(gpus), power_w=column, cap_w=column, temp_c=column,
        util=column, clock_mhz=column, step_s=column,
    )  # fmt: skip
    return _made(base, changes)


def option(**changes: Any) -> Option:
    base = Option(
        kind="shrink", title="Shrink to 7 slots", shape=((0, 1, 2), ()), samples=(16, 0),
        step_s=1.07, tokens_per_s=957.3, goodput=0.93, cost_s=1.5, risk="low",
    )  # fmt: skip
    return _made(base, changes)


def proposal(**changes: Any) -> Proposal:
    infeasible = option(kind="replace", feasible=False, reason="no spare", step_s=float("inf"))
    base = Proposal(
        id="p-1", run=RUN, generation=3, revision=1, created_at=1000.0, expires_at=1900.0,
        replica=0, kind="shrink", cause="rack-0/3 failed", before=(replica_state(),),
        options=(option(), option(kind="carry_on"), infeasible), recommended=0,
        evidence=((999.5, "exit code -9"),),
    )  # fmt: skip
    return _made(base, changes)


def approvals(*names: str) -> tuple[Approval, ...]:
    return tuple(Approval(who=name, via="browser", at=1000.5, option=0) for name in names)


def decide(id: str = "c-1", **changes: Any) -> Decide:
    base = Decide(
        id=id, at=1001.0, who="ana", via="browser", proposal="p-1", generation=3, revision=1,
        verdict="approved",
    )  # fmt: skip
    return _made(base, changes)


def stop(id: str = "s-1", **changes: Any) -> Stop:
    return _made(Stop(id=id, at=1001.0, who="ana", via="cli"), changes)


def started(seq: int = 1, **changes: Any) -> RunStarted:
    base = RunStarted(
        seq=seq, at=1000.0, run=RUN, name="demo", emulated=True, device="emulated",
        config='{"name":"demo"}', seq_len=64, global_batch=16, num_params=500_000,
    )  # fmt: skip
    return _made(base, changes)


def ended(seq: int, **changes: Any) -> RunEnded:
    base = RunEnded(seq=seq, at=1000.0 + seq, run=RUN, status="stopped", reason="asked to")
    return _made(base, changes)


def formed(seq: int, **changes: Any) -> GenerationFormed:
    base = GenerationFormed(
        seq=seq, at=1000.0 + seq, run=RUN, generation=1, first_step=0,
        replicas=(replica_state(),), cause="started",
    )  # fmt: skip
    return _made(base, changes)


def step(seq: int, **changes: Any) -> StepCommitted:
    base = StepCommitted(
        seq=seq, at=1000.0 + seq, run=RUN, step=seq - 2, generation=1, loss=5.0 / seq,
        grad_norm=0.7, tokens=1024, step_s=0.5, exposed_sync_s=0.01,
        samples=((0, 0, 8), (1, 8, 8)), replica_step_s=(0.49, 0.5),
    )  # fmt: skip
    return _made(base, changes)


def event(seq: int, **changes: Any) -> EventHappened:
    base = EventHappened(
        seq=seq, at=1000.0 + seq, run=RUN, kind="gpu_failed", severity="critical",
        message="rack-0/3 failed", gpu="rack-0/3", details={"signal": 9},
    )  # fmt: skip
    return _made(base, changes)


def proposed(seq: int, **changes: Any) -> ProposalChanged:
    return ProposalChanged(seq=seq, at=1000.0 + seq, run=RUN, proposal=proposal(**changes))


def decision(seq: int, **changes: Any) -> DecisionMade:
    base = DecisionMade(
        seq=seq, at=1000.0 + seq, run=RUN, id="c-1", proposal="p-1", generation=3,
        verdict="approved", option=0, who="ana", via="browser", reason="",
    )  # fmt: skip
    return _made(base, changes)


def spent(seq: int, begin: float, end: float, **changes: Any) -> LedgerSpent:
    base = LedgerSpent(
        seq=seq, at=end, run=RUN, bucket="productive", begin=begin, end=end, tokens=1024
    )
    return _made(base, changes)


def journal(num_entries: int) -> list[JournalEntry]:
    """A run's journal of all kinds of entries, seq 1 to `num_entries`; mostly steps."""
    entries: list[JournalEntry] = [started()]
    for seq in range(2, num_entries + 1):
        match seq % 10:
            case 3:
                entries.append(event(seq))
            case 4:
                entries.append(spent(seq, float(seq - 10), float(seq)))
            case 5 if seq == 5:
                entries.append(formed(seq))
            case 6 if seq < 100:
                entries.append(proposed(seq, id=f"p-{seq}", created_at=1000.0 + seq))
            case 7 if seq < 100:
                entries.append(decision(seq, id=f"c-{seq}"))
            case _:
                entries.append(step(seq))
    return entries
