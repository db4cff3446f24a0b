"""The contract of the live store (storage.live.port), over every backend."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from storage.audit import AuditNote
from storage.audit_records import SignedIn
from storage.commands import CommandResult
from storage.live import port
from storage.live.port import LiveStore
from storage.notifier_state import ChannelState, NotifierState
from tests.contract import records
from tests.contract.records import RUN

Plant = Callable[[str, int, bytes], None]


# runs ----------------------------------------------------------------------------------------
def test_run_is_replaced_by_newer_state_only(store: LiveStore) -> None:
    store.ping()
    assert store.get_run(RUN) is None
    state = records.run_state()
    store.put_run(state)
    store.put_run(msgspec.structs.replace(state, updated_at=199.0, step=7))
    store.put_run(msgspec.structs.replace(state, updated_at=300.0, generation=2, step=8))
    assert store.get_run(RUN) == state
    newer = msgspec.structs.replace(state, updated_at=300.0, step=42)
    store.put_run(newer)
    assert store.get_run(RUN) == newer


def test_runs_are_listed_newest_first(store: LiveStore) -> None:
    for number in (2, 1, 3):
        store.put_run(records.run_state(run=f"run-{number}", started_at=float(number)))
    assert [state.run for state in store.list_runs()] == ["run-3", "run-2", "run-1"]


def test_of_too_many_runs_the_quietest_recorded_ones_are_forgotten(store: LiveStore) -> None:
    store.append("run-0", [records.started(run="run-0")])
    store.put_proposal(records.proposal(run="run-1"))
    store.put_racks([records.rack(run="run-1")])
    for number in range(port.MAX_RUNS + 1):
        store.put_run(
            records.run_state(run=f"run-{number}", started_at=-float(number), updated_at=number)
        )
    # The recorder does not have run-0 yet; the others hold nothing back
    assert "run-0" in store.list_journals()
    store.acknowledge("run-0", 1)
    for number in (101, 102):
        store.put_run(records.run_state(run=f"run-{number}", updated_at=number + 0.0))
    kept = {state.run for state in store.list_runs()}
    assert len(kept) == port.MAX_RUNS
    assert not kept & {"run-0", "run-1", "run-2"}
    assert store.list_journals() == {}
    assert store.get_racks("run-1") == {}
    assert store.list_proposals("run-1") == []


# racks ---------------------------------------------------------------------------------------
def test_racks_keep_the_newest_and_a_bounded_history(store: LiveStore) -> None:
    for second in range(port.MAX_RACK_HISTORY + 5):
        store.put_racks([records.rack(at=100.0 + second), records.rack("rack-1", at=5.0)])
    newest = store.get_racks(RUN)
    assert list(newest) == ["rack-0", "rack-1"]
    assert newest["rack-0"].at == 100.0 + port.MAX_RACK_HISTORY + 4
    assert newest["rack-0"].column("power_w").shape == (8,)
    history = store.rack_history(RUN, "rack-0", count=3)
    assert [record.at for record in history] == [702.0, 703.0, 704.0]
    assert len(store.rack_history(RUN, "rack-0", count=10_000)) == port.MAX_RACK_HISTORY
    # The same second again is not a second point of the chart
    assert len(store.rack_history(RUN, "rack-1")) == 1
    assert store.rack_history(RUN, "rack-9") == []
    assert store.get_racks("other") == {}


def test_a_large_cluster_fits_one_call(store: LiveStore) -> None:
    store.put_racks([records.rack(f"rack-{number:03}", gpus=72) for number in range(455)])
    assert len(store.get_racks(RUN)) == 455


# journal -------------------------------------------------------------------------------------
def test_journal_ignores_what_it_has(store: LiveStore) -> None:
    entries = records.journal(1000)
    assert store.last_seq(RUN) == 0
    assert store.append(RUN, entries[:600]) == 600
    assert store.append(RUN, entries[300:]) == 1000
    assert store.append(RUN, entries[:10]) == 1000
    assert store.append(RUN, []) == 1000
    assert store.last_seq(RUN) == 1000
    assert store.read_journal(RUN, 0, count=2000) == entries
    assert store.read_journal(RUN, 990, count=4) == entries[990:994]
    assert store.read_journal(RUN, 1000) == []
    assert store.tail_journal(RUN, 3) == entries[-3:]
    assert store.tail_journal(RUN, 0) == []
    assert store.list_journals() == {RUN: (1000, 0)}


def test_append_notices_that_the_store_lost_entries(store: LiveStore) -> None:
    entries = records.journal(450)
    # The writer believes that 400 are there, but the store was wiped
    assert store.append(RUN, entries[400:], after=400) == 0
    assert store.last_seq(RUN) == 0
    assert store.append(RUN, entries, after=0) == 450
    assert store.append(RUN, entries[440:], after=440) == 450


def test_acknowledged_entries_are_trimmed_down_to_a_tail(store: LiveStore) -> None:
    num_entries = port.JOURNAL_TAIL + 2000
    store.append(RUN, records.journal(num_entries))
    assert store.acknowledged(RUN) == 0
    store.acknowledge(RUN, 500)
    assert store.acknowledged(RUN) == 500
    assert store.read_journal(RUN, 0, count=1)[0].seq == 501
    store.acknowledge(RUN, num_entries)
    store.acknowledge(RUN, 100)
    assert store.acknowledged(RUN) == num_entries
    assert store.read_journal(RUN, 0, count=1)[0].seq == 2001
    assert store.last_seq(RUN) == num_entries
    assert store.append(RUN, [records.step(num_entries + 1)]) == num_entries + 1


def test_what_is_not_acknowledged_is_never_trimmed(store: LiveStore) -> None:
    num_entries = port.JOURNAL_TAIL + 2000
    store.append(RUN, records.journal(num_entries))
    store.acknowledge(RUN, 0)
    assert len(store.read_journal_raw(RUN, 0, count=num_entries + 1)) == num_entries


def test_a_reader_waits_for_an_entry(store: LiveStore) -> None:
    begun = time.monotonic()
    assert store.read_journal(RUN, 0, block_ms=50) == []
    assert time.monotonic() - begun > 0.04
    writer = threading.Timer(0.05, store.append, [RUN, [records.started()]])
    writer.start()
    try:
        assert store.read_journal(RUN, 0, block_ms=2000) == [records.started()]
        assert time.monotonic() - begun < 2.0
    finally:
        writer.join()


def test_a_bad_entry_hides_no_other(
    store: LiveStore, plant: Plant, caplog: pytest.LogCaptureFixture
) -> None:
    store.append(RUN, [records.started()])
    for seq in (2, 3):
        plant(RUN, seq, b"\x81\xa3not")
    store.append(RUN, [records.step(4)])
    good = [records.started(), records.step(4)]
    with caplog.at_level(logging.WARNING):
        assert store.read_journal(RUN, 0) == good
        # Nothing but bad entries is not the end of the journal
        assert store.read_journal(RUN, 1, count=2) == good[1:]
        assert store.tail_journal(RUN, 10) == good
    assert len(caplog.records) == 2, "once for each bad entry"
    assert [seq for seq, _ in store.read_journal_raw(RUN, 0)] == [1, 2, 3, 4]


def test_a_diverged_loss_arrives(store: LiveStore) -> None:
    store.append(RUN, [records.step(1, loss=float("nan"), grad_norm=float("inf"))])
    (entry,) = store.read_journal(RUN, 0)
    assert entry.loss != entry.loss
    assert entry.grad_norm == float("inf")


# proposals -----------------------------------------------------------------------------------
def test_a_proposal_needs_a_higher_revision(store: LiveStore) -> None:
    first = records.proposal()
    assert store.get_proposal(RUN, "p-1") is None
    assert store.put_proposal(first)
    assert store.put_proposal(first), "a retry is harmless"
    assert not store.put_proposal(msgspec.structs.replace(first, cause="other"))
    second = msgspec.structs.replace(first, revision=2, state="stale", state_reason="why")
    assert store.put_proposal(second)
    assert not store.put_proposal(first)
    assert store.get_proposal(RUN, "p-1") == second
    assert store.list_proposals("other") == []


def test_proposals_are_bounded_and_newest_first(store: LiveStore) -> None:
    num_proposals = port.MAX_PROPOSALS + 3
    for number in range(num_proposals):
        store.put_proposal(records.proposal(id=f"p-{number}", created_at=float(number)))
    listed = [proposal.id for proposal in store.list_proposals(RUN)]
    assert listed == [f"p-{number}" for number in range(num_proposals - 1, 2, -1)]
    assert [p.id for p in store.list_proposals(RUN, limit=2)] == listed[:2]
    assert store.get_proposal(RUN, "p-0") is None


# commands ------------------------------------------------------------------------------------
def test_commands_are_read_in_order_from_a_position(store: LiveStore) -> None:
    for number in range(3):
        result = store.submit(RUN, records.stop(f"s-{number}"), now=10.0)
        assert (result.ok, result.code, result.at) == (True, "accepted", 10.0)
    read = store.read_commands(RUN, "")
    assert [command.id for _, command in read if command] == ["s-0", "s-1", "s-2"]
    assert store.read_commands(RUN, read[1][0], block_ms=10) == read[2:]
    assert store.read_commands(RUN, read[2][0]) == []
    assert store.read_commands(RUN, "", count=1) == read[:1]


def test_a_command_counts_once(store: LiveStore) -> None:
    first = store.submit(RUN, records.stop(), now=10.0)
    again = store.submit(RUN, records.stop(), now=20.0)
    assert (again.ok, again.code, again.at) == (True, "duplicate", 10.0)
    assert first.message in again.message
    assert len(store.read_commands(RUN, "")) == 1


def test_results_are_the_controllers_answer(store: LiveStore) -> None:
    store.submit(RUN, records.stop(), now=10.0)
    assert store.get_result(RUN, "s-1") is None
    result = CommandResult(id="s-1", at=11.0, ok=True, code="done", message="Stopped.")
    store.put_result(RUN, result)
    assert store.get_result(RUN, "s-1") == result


# telling people ------------------------------------------------------------------------------
def test_the_notifier_says_how_it_does(store: LiveStore) -> None:
    assert store.get_notifier() is None
    state = NotifierState(
        at=1.0, host="here", base_url="http://127.0.0.1:8501", channels=(ChannelState(name="a"),)
    )
    store.put_notifier(state)
    newer = msgspec.structs.replace(state, at=2.0, missed=3)
    store.put_notifier(newer)
    assert store.get_notifier() == newer


# notes for the audit -------------------------------------------------------------------------
def _came(number: int) -> AuditNote:
    asked = SignedIn(id=f"s{number}", at=1.0, who="ana", via="browser", event="signed in")
    return AuditNote(run="", code="", asked=asked)


def test_notes_are_kept_once_and_in_order_until_acknowledged(store: LiveStore) -> None:
    assert store.read_notes(0) == []
    for number in (1, 2, 3, 2):
        store.note(_came(number))
    notes = store.read_notes(0)
    assert [note for _, _, note in notes] == [_came(1), _came(2), _came(3)]
    places = [place for place, _, _ in notes]
    assert places == sorted(set(places))
    assert all(abs(at - time.time()) < 60 for _, at, _ in notes)
    assert store.read_notes(places[0]) == notes[1:]
    assert store.read_notes(0, count=2) == notes[:2]
    store.acknowledge_notes(places[1])
    store.acknowledge_notes(places[0])
    assert store.read_notes(0) == notes[2:]


def test_a_decision_that_is_refused_at_once_is_noted_once(store: LiveStore) -> None:
    decide = records.decide()
    for _ in range(2):
        assert not store.submit(RUN, decide, now=1.0).ok
    assert [note for _, _, note in store.read_notes(0)] == [
        AuditNote(run=RUN, code="unknown", asked=decide)
    ]
    store.put_proposal(records.proposal())
    assert store.submit(RUN, records.decide(id="c-9"), now=1.0).ok
    assert len(store.read_notes(0)) == 1
