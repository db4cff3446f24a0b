"""What a controller that takes over still knows of health."""

from __future__ import annotations

import msgspec
import pytest

from runtime.control import messages as m
from runtime.control.coordinator import Coordinator
from runtime.control.memory import Memory, recall, remember
from runtime.health.observation import Observation
from storage.commands import Fault
from tests.support.health_run import CONFIG, Run


def restarted(run: Run) -> None:
    """A new coordinator takes over from what the old one wrote down."""
    old = run.coordinator
    assert old.plan is not None
    memory = msgspec.json.decode(msgspec.json.encode(remember(old, "")), type=Memory)
    run.coordinator = Coordinator(CONFIG, run="r", store=("127.0.0.1", 1), now=run.now)
    run.states.clear()
    recall(run.coordinator, memory, {old.number: old.plan}, [], run.now)
    run.take(run.coordinator.outgoing.take())
    pids = {view.gpu: view.pid for view in run.coordinator.fleet}
    run.tell(m.AgentHello(host="localhost", pid=1, gpus=tuple(pids), workers=pids))


def test_reports_survive_a_controller() -> None:
    run = Run()
    run.report("failed")
    run.see(94, "suspect", gpu="rack-1/2")
    evidence = run.coordinator.examiner.verdict("rack-0/3").evidence
    restarted(run)
    assert run.states == {"rack-0/3": "failed", "rack-1/2": "suspect"}
    verdict = run.coordinator.examiner.verdict("rack-0/3")
    assert verdict.evidence == evidence
    assert "the fan is loud (ada)" in verdict.reason
    assert run.report("healthy").ok
    assert run.states["rack-0/3"] == "healthy"


def test_a_quarantine_survives_a_controller_with_its_back_off() -> None:
    run = Run()
    quarantine_s = CONFIG.health.verdict.quarantine_s

    def fall_and_be_repaired() -> None:
        run.now += 1.0
        run.see(64, "draining")
        repair = Fault(
            id=f"f{next(run.ids)}", at=run.now, who="ada", via="cli", gpu="rack-0/3", kind="repair"
        )
        run.take(run.coordinator.command(repair, run.now))

    for _ in range(3):
        fall_and_be_repaired()
    until = run.now + quarantine_s
    restarted(run)
    assert run.states == {"rack-0/3": "draining"}
    verdict = run.coordinator.examiner.verdict("rack-0/3")
    assert (verdict.action, verdict.quarantined_until) == ("QUARANTINE", until)
    run.now = until - 0.1
    run.take(run.coordinator.tick(run.now))
    assert run.states["rack-0/3"] == "draining"
    run.now = until
    run.take(run.coordinator.tick(run.now))
    assert run.states["rack-0/3"] == "healthy"
    restarted(run)
    fall_and_be_repaired()  # Soon again: the new controller knows how often it fell.
    found = run.coordinator.examiner.verdict("rack-0/3").quarantined_until
    assert found == run.now + 2 * quarantine_s


def test_what_agents_tell_a_new_controller_again_counts_once() -> None:
    run = Run()
    seen = Observation(source="kernel_log", gpu="rack-0/3", code=94, verdict="suspect")
    told = m.Observed(host="localhost", id="same", observation=seen)
    run.tell(told)
    for _ in range(5):
        restarted(run)
        run.tell(told)
    assert run.states == {"rack-0/3": "suspect"}  # Not five of them, which would drain it.


@pytest.mark.parametrize("still", [True, False])
def test_slowness_survives_a_controller_and_is_looked_at_again(still: bool) -> None:
    run = Run()

    def pace(gpu: str) -> float:
        return 2.0 if gpu == "rack-1/5" else 1.0

    for _ in range(6):
        run.step(pace)
    restarted(run)
    assert run.states == {"rack-1/5": "degraded"}
    assert run.coordinator.examiner.slowness("rack-1/5") == pytest.approx(2.0, rel=0.05)
    for _ in range(40):
        run.step(pace if still else lambda _gpu: 1.0)
        run.take(run.coordinator.tick(run.now))
    assert run.states["rack-1/5"] == ("degraded" if still else "healthy")


def test_what_becomes_of_a_source_is_in_the_journal_once() -> None:
    run = Run()

    def tell(status: str, reason: str = "") -> None:
        run.tell(m.SourceChanged(host="gpu-7", source="kmsg", status=status, reason=reason))  # type: ignore[arg-type]

    tell("denied", "/dev/kmsg: Operation not permitted; run the agent as root")
    for _ in range(3):
        tell("denied", "/dev/kmsg: Operation not permitted; run the agent as root")
        restarted(run)
    tell("watching")
    denied, watching = [each for each in run.events if each.kind == "health_source"]
    assert "gpu-7: health source kmsg is denied: /dev/kmsg: Operation" in denied.message
    assert (denied.severity, watching.severity) == ("warning", "info")
    assert watching.details["status"] == "watching"
