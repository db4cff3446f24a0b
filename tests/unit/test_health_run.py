"""From observation to proposal: the coordinator with health joined, in simulated time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest

from runtime.config import ClusterConfig, Config, RackConfig
from runtime.control import messages as m
from runtime.control.coordinator import Coordinator
from runtime.control.instructions import Answer, Instruction, Order, Publish, Record
from runtime.control.memory import Memory, recall, remember
from runtime.control.telemetry import HostTelemetry
from runtime.health.address_map import AddressMap
from runtime.health.catalogue import load_catalogue
from runtime.health.config import HealthConfig
from runtime.health.kernel_log import KernelLogReader
from runtime.health.observation import Observation
from storage.commands import CommandResult, Fault, Report
from storage.history.incidents import incidents_of
from storage.records import EventHappened, Proposal

CONFIG = Config()
T0 = 2_000_000_000.0


class Run:
    """A coordinator with workers that answer at once; `step` commits one step with shares."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.now = T0
        self.ids = itertools.count()
        self.coordinator = Coordinator(config, run="r", store=("127.0.0.1", 1), now=T0)
        self.proposals: dict[str, Proposal] = {}
        self.events: list[EventHappened] = []
        self.answers: list[CommandResult] = []
        self.states: dict[str, str] = {}
        self.number = 0
        hosts = {view.host for view in self.coordinator.fleet}
        gpus = [view.gpu for view in self.coordinator.fleet]
        for host in hosts:
            self.tell(m.AgentHello(host=host, pid=1, gpus=tuple(gpus), workers={}))
        for number, gpu in enumerate(gpus):
            self.tell(m.WorkerReady(gpu=gpu, pid=100 + number))
        self.enter()
        for _ in range(20):
            self.step()

    def take(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Publish):
                self.proposals[each.proposal.id] = each.proposal
            elif isinstance(each, Record) and isinstance(each.entry, EventHappened):
                self.events.append(each.entry)
            elif isinstance(each, Answer):
                self.answers.append(each.result)
            elif isinstance(each, Order) and isinstance(each.message, m.SetVerdicts):
                self.states |= each.message.states

    def tell(self, message: m.FromAgent) -> None:
        decoded = m.decode_from_agent(m.encode(message))
        self.take(self.coordinator.handle(decoded, self.now))

    def enter(self) -> None:
        plan = self.coordinator.plan
        assert plan is not None
        for gpu in plan.members():
            self.tell(m.Entered(gpu=gpu, generation=plan.generation, seconds=0.1, bytes_received=0))

    def step(self, factor: Callable[[str], float] = lambda _gpu: 1.0) -> None:
        plan = self.coordinator.plan
        assert plan is not None
        members = plan.members()
        weights = {
            gpu: weight
            for gpus in self.coordinator.examiner._weights.values()
            for gpu, weight in gpus.items()
        }
        jitter = itertools.cycle((1.0, 1.01, 0.99, 1.005))
        shares = [0.1 * weights.get(gpu, 0.0) * factor(gpu) * next(jitter) for gpu in members]
        self.now += 1.0
        self.tell(
            m.StepDone(
                gpu=members[0],
                generation=plan.generation,
                step=self.coordinator.progress.committed,
                at=self.now,
                loss=2.0,
                grad_norm=1.0,
                tokens=64,
                step_s=1.0,
                exposed_sync_s=0.0,
                share_s=tuple(shares),
            )
        )

    def see(
        self, code: int | str | None, verdict: str, *, gpu: str = "rack-0/3", **more: object
    ) -> str:
        seen = Observation(
            source="kernel_log", gpu=gpu, code=code, verdict=verdict, severity="critical", **more
        )  # type: ignore[arg-type]
        told = m.Observed(host="localhost", id=f"o{next(self.ids)}", observation=seen)
        self.tell(told)
        return told.id

    def report(self, state: str, gpu: str = "rack-0/3") -> CommandResult:
        command = Report(
            id=f"c{next(self.ids)}", at=self.now, who="ada", via="cli", gpu=gpu, state=state,
            reason="the fan is loud",
        )  # type: ignore[arg-type]  # fmt: skip
        self.take(self.coordinator.command(command, self.now))
        return self.answers[-1]

    def open(self) -> list[Proposal]:
        return [p for p in self.proposals.values() if p.state == "open"]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


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


# a switch of a rack ----------------------------------------------------------------------------

TWO_HOSTS = msgspec.structs.replace(
    CONFIG,
    cluster=ClusterConfig(
        racks=(RackConfig(name="rack-0", host="a"), RackConfig(name="rack-1", host="b"))
    ),
)
FATAL = "[9.1] nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): {}, Fatal, Link 28 LTSSM Fault Up"


def see_line(run: Run, line: str, host: str) -> None:
    """A line of the kernel log, as the host's source and agent tell of it."""
    for seen in KernelLogReader(load_catalogue(), 2031).read([line]):
        placed = AddressMap(["rack-0/0"]).placed(seen)
        told = m.Observed(host=host, id=f"s{next(run.ids)}", observation=placed)
        run.tell(told)


@pytest.mark.parametrize(
    ("code", "state", "action"),
    [(20034, "draining", "RESET_GPUS_AND_NVSWITCHES"), (23001, "failed", "RESTART_BM")],
)
def test_a_fatal_switch_error_speaks_against_its_whole_rack(
    code: int, state: str, action: str
) -> None:
    run = Run(TWO_HOSTS)
    see_line(run, FATAL.format(code), "b")
    assert run.states == {f"rack-1/{slot}": state for slot in range(8)}
    verdict = run.coordinator.examiner.verdict("rack-1/5")
    assert verdict.action == action
    assert f"SXid {code} (nvidia-nvswitch0 link 28)" in verdict.evidence[-1][1]
    (event,) = [each for each in run.events if each.kind == "switch_failed"]
    assert (event.rack, event.replica, event.severity, event.gpu) == (
        "rack-1", 1, "critical", None,
    )  # fmt: skip
    assert event.details["action"] == action
    assert not [each for each in run.events if each.kind.startswith("gpu_")]  # One event, not 8.

    (proposal,) = run.open()
    assert (proposal.replica, proposal.created_at) == (1, run.now)
    recommended = proposal.options[proposal.recommended]
    assert recommended.kind == "drop"
    assert recommended.shape == (tuple(range(8)), ())
    assert f"SXid {code}" in proposal.cause

    (incident,) = incidents_of([], run.events, list(run.proposals.values()), [], run.now + 1)
    assert (incident.replica, incident.title) == (1, event.message)


def test_a_rack_comes_back_once_its_switch_is_well() -> None:
    run = Run(TWO_HOSTS)
    see_line(run, FATAL.format(20034), "b")
    for slot in range(8):
        assert run.report("healthy", gpu=f"rack-1/{slot}").ok
    run.now += 60.0
    run.take(run.coordinator.tick(run.now))
    assert set(run.states.values()) == {"healthy"}
    assert run.open() == []  # What was proposed has lapsed.


def test_links_of_a_failed_switch_that_go_down_with_it_are_told_and_count_once() -> None:
    run = Run(TWO_HOSTS)
    for link in range(24, 34):
        see_line(run, FATAL.format(20034).replace("28", str(link)), "b")
    assert run.kinds().count("switch_failed") == 1
    assert run.kinds().count("switch_observed") == 9
    assert len(run.open()) == 1


def test_what_is_not_fatal_to_a_switch_condemns_nothing() -> None:
    run = Run(TWO_HOSTS)
    line = "[9.1] nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20009, Non-fatal, Link 04 RX Short"
    see_line(run, line, "b")
    assert run.states == {}
    (event,) = [each for each in run.events if each.kind == "switch_observed"]
    assert (event.rack, event.severity) == ("rack-1", "warning")
    assert run.open() == []


def test_a_switch_of_a_host_with_several_racks_is_pinned_or_told_as_unplaced() -> None:
    run = Run()
    see_line(run, FATAL.format(20034), "localhost")
    assert run.states == {}
    (event,) = [each for each in run.events if each.kind == "health_unplaced"]
    assert '[health.switches] "0000:c2:00.0" = "rack-0"' in event.message
    assert event.severity == "critical"
    health = HealthConfig(switches={"0000:c2:00.0": "rack-1"})
    pinned = Run(msgspec.structs.replace(CONFIG, health=health))
    see_line(pinned, FATAL.format(20034), "localhost")
    assert set(pinned.states) == {f"rack-1/{slot}" for slot in range(8)}


def test_the_only_rack_is_not_dropped() -> None:
    cluster = ClusterConfig(racks=(RackConfig(name="rack-0"),))
    run = Run(msgspec.structs.replace(CONFIG, cluster=cluster))
    see_line(run, FATAL.format(20034), "localhost")
    assert set(run.states.values()) == {"draining"}
    assert run.kinds().count("switch_failed") == 1
    assert run.open() == []


# a controller that is killed -------------------------------------------------------------------


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
