"""The runtime carries out what a known writer signed for a role that may, and nothing else."""

from __future__ import annotations

import msgspec

from storage.audit_records import CommandAnswered
from storage.commands import Command, CommandResult, Decide
from storage.identity import Role, Writer, refusal, sign
from storage.records import Proposal
from tests.support.control_cluster import SimCluster, waiting
from tests.support.control_restart import restart_controller

KEYS: dict[Writer, bytes] = {"app": b"a" * 32, "cli": b"c" * 32}


def _guarded() -> tuple[SimCluster, Proposal, str]:
    cluster, proposal = waiting()
    run = cluster.coordinator.run
    cluster.coordinator.desk.intake.require_identity(
        lambda command, now: refusal(command, run, KEYS, now)
    )
    return cluster, proposal, run


def _decide(cluster: SimCluster, proposal: Proposal) -> Decide:
    return Decide(
        id="x1",
        at=cluster.now,
        who="ada",
        via="browser",
        proposal=proposal.id,
        generation=proposal.generation,
        revision=proposal.revision,
        verdict="approved",
    )


def _refused(cluster: SimCluster, proposal: Proposal, command: Command) -> CommandResult:
    result = cluster.submit(command)
    assert not result.ok
    assert result.code == "not_allowed"
    standing = cluster.proposals[proposal.id]
    assert standing.state == "open"
    # Above what the live store wrote when it took the answer
    assert standing.revision > proposal.revision + 1
    return result


def test_a_viewer_cannot_decide_and_an_approver_can() -> None:
    cluster, proposal, run = _guarded()
    role: Role = "viewer"
    result = _refused(cluster, proposal, sign(_decide(cluster, proposal), run, role, KEYS["app"]))
    assert "role viewer may not do this" in result.message
    decide = _decide(cluster, cluster.proposals[proposal.id])
    assert cluster.submit(sign(decide, run, "approver", KEYS["app"])).ok
    assert cluster.proposals[proposal.id].decided_by == "ada"


def test_forged_and_altered_decisions_are_refused() -> None:
    cluster, proposal, run = _guarded()
    decide = _decide(cluster, proposal)
    _refused(cluster, proposal, decide)
    signed = sign(decide, run, "approver", KEYS["app"])
    _refused(cluster, proposal, msgspec.structs.replace(signed, who="bob"))
    _refused(cluster, proposal, sign(decide, "another", "admin", KEYS["app"]))


def test_a_replayed_command_is_answered_and_not_repeated() -> None:
    cluster, proposal, run = _guarded()
    signed = sign(_decide(cluster, proposal), run, "approver", KEYS["app"])
    assert cluster.submit(signed).code == "done"
    assert cluster.submit(signed).code == "duplicate"
    assert cluster.submit(msgspec.structs.replace(signed, id="x2")).code == "not_allowed"


def _told(cluster: SimCluster) -> list[tuple[str, str, bool, str]]:
    entries = [one for one in cluster.entries if isinstance(one, CommandAnswered)]
    return [(one.who, one.role, one.ok, one.code) for one in entries]


def test_every_answer_is_in_the_journal_for_the_audit() -> None:
    cluster, proposal, run = _guarded()
    decide = _decide(cluster, proposal)
    _refused(cluster, proposal, sign(decide, run, "viewer", KEYS["app"]))
    signed = sign(_decide(cluster, cluster.proposals[proposal.id]), run, "approver", KEYS["app"])
    assert cluster.submit(signed).ok
    assert cluster.submit(signed).code == "duplicate"
    # A forger who uses a known id learns its answer, and is recorded as what he is
    assert cluster.submit(msgspec.structs.replace(signed, who="bob")).code == "duplicate"
    assert _told(cluster) == [
        ("ada", "viewer", False, "not_allowed"),
        ("ada", "approver", True, "done"),
        ("ada", "approver", True, "duplicate"),
        ("bob", "approver", False, "not_allowed"),
    ]
    entry = next(one for one in cluster.entries if isinstance(one, CommandAnswered) and one.ok)
    assert entry.what.startswith(f"decide: proposal {proposal.id}, generation ")
    assert entry.reason == decide.reason


def test_a_restarted_controller_knows_what_was_answered() -> None:
    cluster, proposal, run = _guarded()
    cluster.run_steps(2)
    standing = cluster.proposals[proposal.id]
    signed = sign(_decide(cluster, standing), run, "approver", KEYS["app"])
    assert cluster.submit(signed).code == "done"
    restart_controller(cluster)
    cluster.coordinator.desk.intake.require_identity(
        lambda command, now: refusal(command, run, KEYS, now)
    )
    assert cluster.submit(signed).code == "duplicate"


def test_what_does_not_decode_is_in_the_journal_too() -> None:
    cluster, _, _ = _guarded()
    cluster.coordinator.desk.intake.unreadable("17-0", cluster.now)
    cluster.run_steps(1)
    assert _told(cluster) == [("", "", False, "invalid")]
    entry = next(one for one in cluster.entries if isinstance(one, CommandAnswered))
    assert entry.what == "an entry of the commands' stream, 17-0"
