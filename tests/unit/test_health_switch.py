"""A switch of a rack: its fatal errors speak against every GPU behind it."""

from __future__ import annotations

import msgspec
import pytest

from runtime.config import ClusterConfig, RackConfig
from runtime.control import messages as m
from runtime.health.address_map import AddressMap
from runtime.health.catalogue import load_catalogue
from runtime.health.config import HealthConfig
from runtime.health.kernel_log import KernelLogReader
from storage.history.incidents import incidents_of
from tests.support.health_run import CONFIG, Run

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
