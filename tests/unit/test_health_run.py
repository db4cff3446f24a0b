"""From observation to proposal: the coordinator with health joined, in simulated time."""

from __future__ import annotations

import msgspec
import pytest

from runtime.control import messages as m
from runtime.control.telemetry import HostTelemetry
from runtime.health.observation import Observation
from storage.commands import Fault
from tests.support.health_run import CONFIG, T0, Run


def test_a_condemned_gpu_opens_a_planned_drain_at_once() -> None:
    run = Run()
    run.see(64, "draining")
    (proposal,) = run.open()
    assert proposal.created_at == run.now  # Within the same event, not a second later.
    assert proposal.replica == 0
    recommended = proposal.options[proposal.recommended]
    assert recommended.kind in ("shrink", "shrink_boost")
    assert recommended.shape[0] == (0, 1, 2, 4, 5, 6, 7)
    assert "Xid 64" in proposal.cause
    assert any("Xid 64" in text for _, text in proposal.evidence)
    carry_on = next(each for each in proposal.options if each.kind == "carry_on")
    assert carry_on.risk.startswith("High")
    assert run.states == {"rack-0/3": "draining"}
    (event,) = [each for each in run.events if each.kind == "gpu_draining"]
    assert event.details["evidence"]


def test_a_suspicion_is_shown_and_proposes_nothing() -> None:
    run = Run()
    run.see(94, "suspect")
    assert run.open() == []
    assert run.states == {"rack-0/3": "suspect"}


def test_application_faults_change_nothing_but_are_told() -> None:
    run = Run()
    for code in (13, 31, 43):
        run.see(code, "healthy")
    assert run.open() == []
    assert run.states == {}
    assert run.kinds().count("gpu_observed") == 3


def test_what_an_agent_tells_again_counts_once() -> None:
    run = Run()
    seen = Observation(source="kernel_log", gpu="rack-0/3", code=94, verdict="suspect")
    for _ in range(5):
        run.tell(m.Observed(host="localhost", id="same", observation=seen))
    assert run.states == {"rack-0/3": "suspect"}


def test_an_unplaced_observation_is_told() -> None:
    run = Run()
    run.see(79, "failed", gpu="0000:9b:00.0")
    assert "health_unplaced" in run.kinds()
    assert run.open() == []


def test_the_proposal_lapses_when_the_fault_clears() -> None:
    run = Run()
    run.see(64, "draining")
    run.report("healthy")
    assert run.open() == []
    assert run.states["rack-0/3"] == "healthy"
    assert "gpu_cleared" in run.kinds()


def test_a_drain_that_was_rejected_is_asked_again_when_the_gpu_dies() -> None:
    run = Run()
    run.see(64, "draining")
    (proposal,) = run.open()
    run.coordinator.desk._dismiss(run.coordinator.desk.book.facts(proposal.id))
    run.coordinator.desk.book.supersede(0, "a test")
    run.coordinator.desk.refresh(run.coordinator, run.now)
    run.take(run.coordinator.outgoing.take())
    assert run.open() == []
    run.coordinator.fleet.exited("rack-0/3", run.now)
    run.coordinator.desk.refresh(run.coordinator, run.now)
    run.take(run.coordinator.outgoing.take())
    assert len(run.open()) == 1


def test_a_slow_slot_is_found_from_shares_alone() -> None:
    run = Run()
    for _ in range(4):
        run.step(lambda gpu: 2.0 if gpu == "rack-1/5" else 1.0)
    assert run.states == {"rack-1/5": "degraded"}
    (event,) = [each for each in run.events if each.kind == "gpu_degraded"]
    assert "2.0" in event.message
    (proposal,) = run.open()  # A shrink pays: half the pace is worse than seven of eight slots.
    assert proposal.replica == 1
    assert run.coordinator.examiner.slowness("rack-1/5") == pytest.approx(2.0, rel=0.05)


def test_a_slow_slot_that_recovers_is_cleared() -> None:
    run = Run()
    for _ in range(6):
        run.step(lambda gpu: 2.0 if gpu == "rack-1/5" else 1.0)
    for _ in range(30):
        run.step()
        run.take(run.coordinator.tick(run.now))
    assert run.states == {"rack-1/5": "healthy"}
    assert run.open() == []


def test_a_slow_replica_and_a_global_slowdown_blame_no_gpu() -> None:
    run = Run()
    for _ in range(10):
        run.step(lambda gpu: 1.6 if gpu.startswith("rack-1") else 1.0)
    assert run.states == {}
    assert run.kinds().count("replica_slow") == 1
    other = Run()
    for _ in range(10):
        other.step(lambda _gpu: 3.0)
    assert other.states == {}
    assert other.open() == []


def test_a_dead_worker_is_failed_and_repaired() -> None:
    run = Run()
    pid = run.coordinator.fleet["rack-0/3"].pid
    run.tell(m.WorkerExited(gpu="rack-0/3", pid=pid, code=-9, at=run.now))
    assert run.states["rack-0/3"] == "failed"
    assert "signal 9" in run.coordinator.examiner.verdict("rack-0/3").reason
    command = Fault(id="f", at=run.now, who="ada", via="cli", gpu="rack-0/3", kind="repair")
    run.take(run.coordinator.command(command, run.now))
    assert run.states["rack-0/3"] == "repairing"
    run.tell(m.WorkerReady(gpu="rack-0/3", pid=999))
    assert run.states["rack-0/3"] == "healthy"


def test_reports_are_checked() -> None:
    run = Run()
    assert run.report("draining").ok
    assert len(run.open()) == 1
    answer = run.report("failed", gpu="rack-9/3")
    assert (answer.ok, answer.code) == (False, "unknown")


def test_an_agent_that_comes_back_is_told_the_verdicts() -> None:
    run = Run()
    run.see(94, "suspect")
    run.states.clear()
    pids = {view.gpu: view.pid for view in run.coordinator.fleet}
    run.tell(m.AgentHello(host="localhost", pid=1, gpus=tuple(pids), workers=pids))
    assert run.states == {"rack-0/3": "suspect"}


def test_the_config_rules_over_fail_slow() -> None:
    health = msgspec.structs.replace(CONFIG.health, slow_ratio=3.0)
    run = Run(msgspec.structs.replace(CONFIG, health=health))
    for _ in range(10):
        run.step(lambda gpu: 2.0 if gpu == "rack-1/5" else 1.0)
    assert run.states == {}


def test_the_rack_record_follows_verdicts_and_workers() -> None:
    telemetry = HostTelemetry(CONFIG, host="localhost", store=None, clock=lambda: T0)

    def shown() -> str:
        return telemetry.advance(T0, 0.0)[0].state_names()[3]

    assert shown() == "failed"  # No worker yet.
    telemetry.worker_started("rack-0/3")
    assert shown() == "healthy"
    for state in ("suspect", "degraded", "draining", "failed", "healthy"):
        telemetry.set_verdicts({"rack-0/3": state})  # type: ignore[dict-item]
        assert shown() == state
    telemetry.worker_exited("rack-0/3")
    assert shown() == "failed"
    telemetry.set_verdicts({"rack-0/3": "repairing"})
    telemetry.worker_started("rack-0/3")
    assert shown() == "repairing"


def test_what_slows_everybody_blames_nobody() -> None:
    """A slow input pipeline: told once, nothing proposed, over when it is."""
    run = Run()
    for _ in range(20):
        run.step()
    for _ in range(12):
        run.step(lambda _gpu: 1.6)
    assert run.kinds().count("run_slow") == 1
    (event,) = [each for each in run.events if each.kind == "run_slow"]
    assert "input pipeline" in event.message
    assert event.gpu is None
    assert run.open() == []
    assert run.states == {}
    assert "replica_slow" not in run.kinds()
    for _ in range(12):
        run.step()
    assert run.kinds().count("run_recovered") == 1
