"""A scripted run that feeds the stores as a real one would: for tests of the pages, and for looking
at them.

Two racks of 8. It trains on, and answers commands like a controller does: a killed GPU leaves its
replica out and opens a proposal; an approved one is applied a moment later and measured. Journal
entries are kept in `entries` as well, so that a test can put them into SQL.
"""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import dataclass, field

import msgspec
import numpy as np

from storage.commands import CommandResult, Decide, Fault, Trigger
from storage.live.port import LiveStore, LiveStoreDown
from storage.records import (
    GPU_STATES,
    ActionKind,
    DecisionMade,
    EventHappened,
    GenerationFormed,
    JournalEntry,
    LedgerSpent,
    Option,
    Outcome,
    Proposal,
    ProposalChanged,
    RackRecord,
    ReplicaState,
    RunEnded,
    RunStarted,
    RunState,
    StepCommitted,
)

NORMAL_W, MAX_W, BUDGET_W = 680.0, 900.0, 6000.0
BATCH, SEQ_LEN = 32, 512
IDEAL_STEP_S = 0.9


@dataclass
class Gpu:
    state: str = "healthy"
    cap_w: float = NORMAL_W
    slowness: float = 1.0


@dataclass
class Replica:
    """What a replica of the scripted run is up to."""

    index: int
    rack: str
    gpus: list[Gpu]
    live: list[int]
    mode: str = "training"


@dataclass
class Feeder:
    """num_racks racks of num_slots; one replica each."""

    store: LiveStore
    run: str = "demo-1"
    name: str = "demo"
    num_racks: int = 2
    num_slots: int = 8
    step_every_s: float = 0.5
    expires_s: float = 600.0
    prefill: int = 240
    seq: int = 0
    step: int = 0
    generation: int = 1
    entries: list[JournalEntry] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)
    ledger: dict[str, float] = field(default_factory=dict)
    proposal: Proposal | None = None
    position: str = ""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(7)
        self.replicas = [
            Replica(i, f"r{i}", [Gpu() for _ in range(self.num_slots)], list(range(self.num_slots)))
            for i in range(self.num_racks)
        ]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._due = 0.0
        self.ended: str | None = None

    # what drives it ------------------------------------------------------------------------------
    def begin(self) -> None:
        """Write the run's start and a past of `prefill` steps."""
        now = time.time()
        self.started_at = now - self.prefill * IDEAL_STEP_S - 4.0
        self.clock = self.started_at
        config = json.dumps({"name": self.name, "model": {"num_layers": 4, "hidden": 128}})
        self._append(
            RunStarted(
                seq=self._next(), at=self.clock, run=self.run, name=self.name, emulated=True,
                device="emulated B200", config=config, seq_len=SEQ_LEN, global_batch=BATCH,
                num_params=1_320_000,
            )
        )  # fmt: skip
        self._spend("starting", 4.0)
        self._form("run started")
        for _ in range(self.prefill):
            self._commit(IDEAL_STEP_S)
        self._append_all()
        self._publish()

    def start(self) -> Feeder:
        """Begin, then go on in a thread until `stop`."""
        self.begin()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)

    def end(self, status: str = "stopped", reason: str = "stopped by an operator") -> None:
        """The run ends; the thread stops."""
        self.stop()
        self.ended = status
        self._spend("unknown", max(0.0, time.time() - self.clock))
        self._append(
            RunEnded(seq=self._next(), at=self.clock, run=self.run, status=status, reason=reason)
        )
        self._append_all()
        self._publish(reason)

    def _loop(self) -> None:
        last = time.time()
        while not self._stop.wait(0.1):
            try:
                for position, command in self.store.read_commands(self.run, self.position):
                    self.position = position
                    if command is not None:
                        self._answer(command)
                self._advance_proposal()
                if time.time() - last >= self.step_every_s:
                    self._commit(time.time() - last)
                    last = time.time()
                self._append_all()
                self._publish()
            except LiveStoreDown:
                continue

    # commands ------------------------------------------------------------------------------------
    def _answer(self, command: object) -> None:
        message = "done"
        if isinstance(command, Fault):
            self.fault(command.gpu, command.kind, command.factor)
        elif isinstance(command, Trigger):
            self._propose(command.replica, command.kind, f"asked for by {command.who}")
            message = "a proposal was made"
        elif isinstance(command, Decide):
            self._decided(command)
        result = CommandResult(id=command.id, at=time.time(), ok=True, code="done", message=message)  # type: ignore[attr-defined]
        self.store.put_result(self.run, result)

    def fault(self, gpu_id: str, kind: str, factor: float = 1.0) -> None:
        """kill, slow or repair a GPU, with what follows from it."""
        rack, _, slot = gpu_id.rpartition("/")
        replica = next(one for one in self.replicas if one.rack == rack)
        gpu = replica.gpus[int(slot)]
        if kind == "kill":
            gpu.state = "failed"
            replica.live = [one for one in replica.live if one != int(slot)]
            replica.mode = "standby" if replica.live else "out"
            self._event(
                "gpu_failed", "critical", f"GPU {gpu_id} failed: its worker died (SIGKILL)", gpu_id
            )
            self.generation += 1
            self._form(f"GPU {gpu_id} failed")
            self._event(
                "replica_left_out",
                "warning",
                f"Replica {replica.index} left out; the others carry the whole batch",
                gpu_id,
            )
            if self.proposal is not None and not self.proposal.is_final:
                self._set(
                    state="stale", state_reason=f"stale: a second GPU failed since ({gpu_id})"
                )
            self._propose(replica.index, "shrink", f"GPU {gpu_id} failed")
        elif kind == "repair":
            gpu.state, gpu.slowness = "healthy", 1.0
            self._event("gpu_repaired", "info", f"GPU {gpu_id} was repaired", gpu_id)
            if int(slot) not in replica.live:
                self._propose(replica.index, "grow", f"GPU {gpu_id} came back")
        else:
            gpu.state, gpu.slowness = "degraded", factor
            self._event(
                "gpu_slow", "warning", f"GPU {gpu_id} runs {factor:.1f} times slower", gpu_id
            )

    def _decided(self, command: Decide) -> None:
        held = self.store.get_proposal(self.run, command.proposal)
        if held is None:
            return
        self.proposal = held
        self._append(
            DecisionMade(
                seq=self._next(), at=time.time(), run=self.run, id=command.id, proposal=held.id,
                generation=held.generation, verdict=command.verdict, option=command.option,
                who=command.who, via=command.via, reason=command.reason,
            )
        )  # fmt: skip
        self._append(ProposalChanged(seq=self._next(), at=time.time(), run=self.run, proposal=held))
        self._due = time.time() + 0.8

    # proposals -----------------------------------------------------------------------------------
    def _propose(self, index: int, kind: ActionKind, cause: str) -> None:
        now = time.time()
        replica = self.replicas[index]
        wanted = [i for i, gpu in enumerate(replica.gpus) if gpu.state == "healthy"]
        shapes = {
            "carry_on": () if replica.mode != "training" else tuple(replica.live),
            "drop": (),
            kind: tuple(wanted) if kind != "drop" else (),
        }
        if kind == "shrink":
            shapes["shrink_boost"] = tuple(wanted)
        options = tuple(self._option(name, index, live) for name, live in shapes.items())
        recommended = next(i for i, one in enumerate(options) if one.kind == kind)
        self.proposal = Proposal(
            id=f"p{self.seq}", run=self.run, generation=self.generation, revision=1, created_at=now,
            expires_at=now + self.expires_s, replica=index, kind=kind, cause=cause,
            before=self._states(), options=options, recommended=recommended,
            evidence=((now - 1.2, "the worker's process ended with signal 9"),
                      (now - 0.9, "7 of 8 peers saw its connections close")),
        )  # fmt: skip
        self._write_proposal()

    def _option(self, kind: str, index: int, live: tuple[int, ...]) -> Option:
        shape = tuple(
            live if one.index == index else tuple(one.live) if one.mode == "training" else ()
            for one in self.replicas
        )
        total = sum(map(len, shape)) or 1
        boost = kind == "shrink_boost"
        pace = 1.0 if boost else total / (self.num_racks * self.num_slots)
        step_s = IDEAL_STEP_S / pace
        titles = {
            "carry_on": "Carry on as it is", "drop": f"Drop replica {index}",
            "shrink": f"Shrink replica {index} to {len(live)} slots",
            "shrink_boost": f"Shrink replica {index} to {len(live)} slots and boost them: "
            "0.99 of the healthy pace, limited by the GPUs' highest cap",
            "grow": f"Grow replica {index} to {len(live)} slots",
        }  # fmt: skip
        rack = self.replicas[index].rack
        return Option(
            kind=kind, title=titles[kind], shape=shape,
            samples=tuple(round(BATCH * len(one) / total) for one in shape),
            step_s=step_s, tokens_per_s=BATCH * SEQ_LEN / step_s, goodput=min(1.0, pace),
            cost_s=0.0 if kind == "carry_on" else 1.3,
            risk="none" if kind == "carry_on" else "low: survivors keep what they hold",
            caps_w={f"{rack}/{slot}": 860.0 for slot in live} if boost else {},
            feasible=kind != "carry_on" or bool(live) or self.num_racks > 1,
        )  # fmt: skip

    def _advance_proposal(self) -> None:
        one = self.proposal
        if one is None or time.time() < self._due:
            return
        if one.state == "approved":
            self._set(state="applying")
            self._due = time.time() + 0.8
        elif one.state == "applying":
            self._apply(one)
        elif one.state == "applied" and one.outcome is not None and one.outcome.num_steps == 0:
            option = one.options[one.chosen or 0]
            measured = msgspec.structs.replace(
                one.outcome, num_steps=4, step_s=option.step_s * 1.02,
                tokens_per_s=option.tokens_per_s / 1.02, goodput=option.goodput / 1.02,
            )  # fmt: skip
            self._set(outcome=measured)

    def _apply(self, one: Proposal) -> None:
        option = one.options[one.chosen if one.chosen is not None else one.recommended]
        for replica, live in zip(self.replicas, option.shape, strict=True):
            if replica.index != one.replica:
                continue
            if live:
                replica.mode, replica.live = "training", list(live)
            for slot, gpu in enumerate(replica.gpus):
                gpu.cap_w = option.caps_w.get(f"{replica.rack}/{slot}", NORMAL_W)
        self.generation += 1
        self._form(option.title, one.id)
        self._event(
            "replica_rejoined", "info", f"Replica {one.replica} rejoined: {option.title}", ""
        )
        outcome = Outcome(generation=self.generation, applied_at=time.time(), first_commit_s=1.4)
        self._set(state="applied", outcome=outcome)
        self._due = time.time() + 2.0

    def _set(self, **changes: object) -> None:
        assert self.proposal is not None
        changed = msgspec.structs.replace(
            self.proposal, revision=self.proposal.revision + 1, **changes
        )
        self.proposal = changed
        self._write_proposal()

    def _write_proposal(self) -> None:
        assert self.proposal is not None
        self.store.put_proposal(self.proposal)
        self._append(
            ProposalChanged(seq=self._next(), at=time.time(), run=self.run, proposal=self.proposal)
        )

    # records -------------------------------------------------------------------------------------
    def _next(self) -> int:
        self.seq += 1
        return self.seq

    def _append(self, entry: JournalEntry) -> None:
        self.entries.append(entry)

    def _append_all(self) -> None:
        held = self.store.last_seq(self.run)
        self.store.append(self.run, [one for one in self.entries[-2000:] if one.seq > held])

    def _event(self, kind: str, severity: str, message: str, gpu: str) -> None:
        rack = gpu.rpartition("/")[0] or None
        self._append(
            EventHappened(
                seq=self._next(), at=time.time(), run=self.run, kind=kind, severity=severity,
                message=message, generation=self.generation, rack=rack, gpu=gpu or None,
            )
        )  # fmt: skip

    def _form(self, cause: str, proposal: str = "") -> None:
        self._append(
            GenerationFormed(
                seq=self._next(), at=self.clock, run=self.run, generation=self.generation,
                first_step=self.step + 1, replicas=self._states(), cause=cause, proposal=proposal,
                reconfigure_s=0.4, bytes_moved=120_000,
            )
        )  # fmt: skip

    def _spend(self, bucket: str, duration: float, tokens: int = 0) -> None:
        begin, self.clock = self.clock, self.clock + duration
        self.ledger[bucket] = self.ledger.get(bucket, 0.0) + duration
        self._append(
            LedgerSpent(seq=self._next(), at=self.clock, run=self.run, bucket=bucket, begin=begin,
                        end=self.clock, tokens=tokens)
        )  # fmt: skip

    def _commit(self, duration: float) -> None:
        self.step += 1
        training = [one for one in self.replicas if one.mode == "training"]
        if not training:
            self._spend("waiting_for_approval", duration)
            return
        pace = sum(len(one.live) for one in training) / (self.num_racks * self.num_slots)
        self._spend("productive", duration * pace, BATCH * SEQ_LEN)
        if pace < 1:
            waits = any(one.mode == "standby" for one in self.replicas)
            self._spend("waiting_for_approval" if waits else "degraded", duration * (1 - pace))
        self.loss = 1.6 + 3.6 * math.exp(-self.step / 90) + float(self.rng.normal(0, 0.02))
        self.step_s = IDEAL_STEP_S / pace * float(self.rng.normal(1, 0.01))
        self._append(
            StepCommitted(
                seq=self._next(), at=self.clock, run=self.run, step=self.step,
                generation=self.generation, loss=self.loss, grad_norm=0.8, tokens=BATCH * SEQ_LEN,
                step_s=self.step_s, exposed_sync_s=0.04, samples=((0, self.step * BATCH, BATCH),),
                replica_step_s=tuple(self.step_s for _ in self.replicas),
            )
        )  # fmt: skip

    def _states(self) -> tuple[ReplicaState, ...]:
        return tuple(self._state(one) for one in self.replicas)

    def _state(self, one: Replica) -> ReplicaState:
        total = sum(len(r.live) for r in self.replicas if r.mode == "training") or 1
        trains = one.mode == "training"
        live = len(one.live) or 1

        def share(units: int) -> tuple[int, ...]:
            order = {slot: place for place, slot in enumerate(one.live)}
            return tuple(
                units // live + (order[slot] < units % live) if slot in order else 0
                for slot in range(self.num_slots)
            )

        boosted = max((gpu.cap_w for gpu in one.gpus), default=NORMAL_W) - NORMAL_W
        return ReplicaState(
            replica=one.index, rack=one.rack, mode=one.mode,
            gpus=tuple(f"{one.rack}/{slot}" for slot in range(self.num_slots)),
            live=tuple(one.live), num_samples=round(BATCH * len(one.live) / total) if trains else 0,
            units={"attention": share(16), "mlp": share(43), "vocab": share(32)},
            step_s=IDEAL_STEP_S * self.num_slots / live if trains else 0.0,
            boost_w=max(0.0, boosted),
        )  # fmt: skip

    def _publish(self, reason: str = "") -> None:
        now = time.time()
        wall = self.clock - self.started_at
        productive = self.ledger.get("productive", 0.0)
        status = self.ended or "running"
        self.store.put_run(
            RunState(
                run=self.run, name=self.name, status=status, emulated=True,
                device="emulated B200", started_at=self.started_at, updated_at=now,
                generation=self.generation, step=self.step, seq_len=SEQ_LEN, global_batch=BATCH,
                num_params=1_320_000, replicas=self._states(), ledger=dict(self.ledger),
                wall_s=wall,
                loss=self.loss, tokens_per_s=BATCH * SEQ_LEN / self.step_s, step_s=self.step_s,
                ideal_step_s=IDEAL_STEP_S, time_goodput=min(1.0, productive / wall),
                token_goodput=min(1.0, 0.97 * productive / wall), status_reason=reason,
                ended_at=now if self.ended else None,
            )
        )  # fmt: skip
        self.store.put_racks([self._rack(one, now) for one in self.replicas])

    def _rack(self, one: Replica, now: float) -> RackRecord:
        size = self.num_slots
        dead = np.array([gpu.state == "failed" for gpu in one.gpus])
        cap = np.array([gpu.cap_w for gpu in one.gpus])
        busy = np.where(dead, 0.0, 0.93 if one.mode == "training" else 0.04)
        power = np.where(dead, 0.0, 90 + busy * (cap - 110) + self.rng.normal(0, 6, size))
        columns = {
            "power_w": power, "cap_w": cap, "temp_c": np.where(dead, 31, 34 + power / 18),
            "util": busy, "clock_mhz": np.where(dead, 0, 1200 + 700 * cap / MAX_W),
            "step_s": np.where(dead, 0.0, IDEAL_STEP_S * np.array([g.slowness for g in one.gpus])),
        }  # fmt: skip
        states = bytes(GPU_STATES.index(gpu.state) for gpu in one.gpus)
        packed = {name: values.astype("<f4").tobytes() for name, values in columns.items()}
        return RackRecord(
            run=self.run, rack=one.rack, at=now, emulated=True, budget_w=BUDGET_W * size / 8,
            normal_cap_w=NORMAL_W, max_cap_w=MAX_W, states=states, **packed,
        )  # fmt: skip
