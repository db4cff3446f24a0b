"""Health in a real run: workers train, a slot turns slow, a kernel log speaks; nobody is asked."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.bench import health
from runtime.config import ClusterConfig, Config, EmulatedConfig, RackConfig
from runtime.control.local import LocalRun
from runtime.health.config import HealthConfig
from storage.commands import CommandResult, Decide, Fault, Report
from storage.live.redis_store import RedisStore
from storage.records import EventHappened, Proposal, ProposalChanged, StepCommitted
from tests.support.dashboard import free_port
from tests.support.services import wait_until
from tests.support.up import Up

XID = "[ 1.0] NVRM: Xid (PCI:0000:9b:00): 64, pid=1, Row Remapper: Remapping row failed\n"
# On a busy machine shares are noisy: the device's pace must stand out.
STEP_S = 0.4


def config(log: Path, webhook_port: int) -> Config:
    racks = (RackConfig(name="rack-0", gpus=4), RackConfig(name="rack-1", gpus=4))
    return Config(
        cluster=ClusterConfig(racks=racks),
        emulated=EmulatedConfig(step_s=STEP_S),
        health=HealthConfig(
            sources=("kernel_log", "nvidia_smi"),
            nvidia_smi=str(log.parent / "no-such-nvidia-smi"),
            kernel_log=str(log),
            gpus={"0000:9b:00.0": "rack-1/2"},
            webhook_port=webhook_port,
        ),
    )


def new_id() -> str:
    return uuid.uuid4().hex


def event(kind: str) -> Callable[[Any], bool]:
    return lambda entry: isinstance(entry, EventHappened) and entry.kind == kind


def proposal_of(run: LocalRun, replica: int, state: str, after: int) -> Proposal:
    entry = run.wait_for(
        lambda e: (
            isinstance(e, ProposalChanged)
            and e.proposal.replica == replica
            and e.proposal.state == state
        ),
        30.0,
        after,
    )
    found: Proposal = entry.proposal
    return found


def submit(run: LocalRun, command: Any) -> CommandResult:
    run.submit(command)
    answer: CommandResult = run.wait_for(
        lambda e: isinstance(e, CommandResult) and e.id == command.id, 10.0
    )
    return answer


def states(run: LocalRun) -> dict[str, str]:
    return {
        f"{record.rack}/{slot}": state
        for record in run.telemetry.advance(time.time(), 0.01)
        for slot, state in enumerate(record.state_names())
    }


def post(port: int, body: dict[str, Any]) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/health/report",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return int(answer.status)


@pytest.mark.timeout(240)
def test_a_slow_slot_and_a_suspect_gpu_in_a_real_run(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text(XID)  # Of before we came: it says nothing.
    port = free_port()
    with LocalRun(config(log, port), home=tmp_path) as run:
        run.wait_for(lambda e: isinstance(e, StepCommitted) and e.step >= 15, 120.0)
        assert set(states(run).values()) == {"healthy"}

        # Every source says how it is.
        told = {
            (each.details["source"], each.details["status"])
            for each in run.entries
            if isinstance(each, EventHappened) and each.kind == "health_source"
        }
        assert told == {
            ("kernel_log", "watching"), ("webhook", "watching"), ("nvidia_smi", "missing"),
        }  # fmt: skip

        # Fail-slow, from telemetry alone.
        after, began = len(run.entries), time.monotonic()
        slow = Fault(
            id=new_id(), at=time.time(), who="ada", via="cli", gpu="rack-0/1", kind="slow",
            factor=2.0,
        )  # fmt: skip
        assert submit(run, slow).ok
        degraded = run.wait_for(event("gpu_degraded"), 60.0, after)
        assert degraded.gpu == "rack-0/1"
        assert "times that of its peers" in degraded.message
        assert time.monotonic() - began < 30.0
        assert proposal_of(run, 0, "open", after).kind in ("shrink", "shrink_boost")
        deadline = time.monotonic() + 5.0
        while states(run)["rack-0/1"] != "degraded" and time.monotonic() < deadline:
            run.wait_for(lambda e: isinstance(e, StepCommitted), 10.0, len(run.entries))
        assert states(run)["rack-0/1"] == "degraded"

        # From a line in the kernel log to a proposal within a second; a live shrink before it dies.
        after, began = len(run.entries), time.time()
        with log.open("a") as file:
            file.write(XID)
        proposal = proposal_of(run, 1, "open", after)
        assert proposal.created_at - began < 1.0
        assert "Xid 64" in proposal.cause
        answer = submit(
            run,
            Decide(
                id=new_id(), at=time.time(), who="ada", via="cli", proposal=proposal.id,
                generation=proposal.generation, revision=proposal.revision, verdict="approved",
                option=next(i for i, o in enumerate(proposal.options) if o.kind == "shrink"),
                reason="no boost today",
            ),
        )  # fmt: skip
        assert answer.ok, answer.message
        proposal_of(run, 1, "applied", after)
        plan = run.controller.coordinator.plan
        assert plan is not None
        assert plan.replicas[1].live == (0, 1, 3)
        assert run.controller.coordinator.fleet["rack-1/2"].status == "alive"
        failed = [e for e in run.entries if isinstance(e, EventHappened) and e.kind == "gpu_failed"]
        assert failed == []  # Nothing died: it was left before.

        # An operator says it is fine: it may come back.
        after = len(run.entries)
        report = Report(
            id=new_id(), at=time.time(), who="ada", via="cli", gpu="rack-1/2", state="healthy",
            reason="the board was reset",
        )  # fmt: skip
        assert submit(run, report).ok
        assert proposal_of(run, 1, "open", after).kind == "grow"

        # Another system knows of a GPU what nothing here can see.
        after, began = len(run.entries), time.time()
        assert post(port, {"gpu": "rack-1/0", "state": "draining", "reason": "burn-in"}) == 202
        proposal = proposal_of(run, 1, "open", after)
        assert proposal.created_at - began < 1.0
        assert "rack-1/0 is draining: webhook: reported - burn-in" in proposal.cause


def test_bench_health_reaches_its_targets() -> None:
    figures = health.measure(lambda _line: None)
    assert figures["lines_per_s"] >= 10_000
    assert all(target.is_reached(figures) for target in health.targets(figures))


QUARANTINE = """
[cluster]
racks = [{{ name = "rack-0", gpus = 2 }}, {{ name = "rack-1", gpus = 2 }}]

[emulated]
step_s = 0.3

[health]
sources = ["kernel_log"]
kernel_log = "{log}"
gpus = {{ "0000:9b:00.0" = "rack-1/1" }}

[health.verdict]
flaps = 2
"""


@pytest.mark.timeout(240)
def test_a_killed_controller_remembers_a_quarantine(tmp_path: Path) -> None:
    log, settings = tmp_path / "kern.log", tmp_path / "run.toml"
    log.touch()
    settings.write_text(QUARANTINE.format(log=log))
    up = Up(tmp_path / "home", "--fresh", "--config", str(settings))
    up.start()
    try:
        up.await_line(r"training +first step committed")
        for after in ("healthy", "draining"):
            with log.open("a") as file:
                file.write(XID)
            wait_until(lambda: held(up)["action"] == "RESET_GPU", 10.0, "a drain")
            assert up.cli("fault", "repair", "rack-1/1")["ok"]
            wait_until(lambda: held(up)["action"] != "RESET_GPU", 10.0, "the repair told")
            before = held(up)
            assert before["state"] == after
        assert before["action"] == "QUARANTINE"

        (pid,) = [pid for pid, line in up.processes().items() if " controller " in line]
        os.kill(pid, signal.SIGKILL)
        up.await_line(r"the controller took the run over")
        step = up.cli("status")["step"]
        wait_until(lambda: up.cli("status")["step"] > step + 2, 30.0, "steps after the restart")
        after = held(up)
        assert after["quarantined_until"] == before["quarantined_until"]
        assert after["evidence"] == before["evidence"]  # The agent told it again: it counts once.
        assert shown_state(up, "rack-1/1") == "draining"
        (source,) = up.cli("health", "sources")["sources"]
        assert (source["source"], source["status"]) == ("kernel_log", "watching")
    finally:
        up.interrupt()
        up.kill_hard()


HEALTHY = {"state": "healthy", "action": ""}


def held(up: Up) -> dict[str, Any]:
    """The verdict on rack-1/1, as the controller has written it down."""
    (path,) = (up.home / "runs").glob("*/memory.json")
    gpus = json.loads(path.read_bytes())["health"]["gpus"]
    return dict(gpus["rack-1/1"]["verdict"]) if "rack-1/1" in gpus else HEALTHY


def shown_state(up: Up, gpu: str) -> str:
    store = RedisStore.for_ui(f"unix://{up.home}/redis.sock")
    try:
        rack, _, slot = gpu.partition("/")
        return store.get_racks(up.cli("status")["run"])[rack].state_names()[int(slot)]
    finally:
        store.close()
