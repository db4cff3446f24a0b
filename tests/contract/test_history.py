"""The history over SQLite and PostgreSQL: writing exactly once, reading within bounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, func, select, text

from storage.history import retention
from storage.history.database import HistoryDown, open_history
from storage.history.queries import SILENT_S, History
from storage.history.rows import BadEntry
from storage.history.schema import upgrade
from storage.history.tables import BAD_RECORDS, LEDGER, METADATA, POSITIONS, STEPS
from storage.history.writer import HistoryWriter
from storage.records import (
    DecisionMade,
    EventHappened,
    GenerationFormed,
    JournalEntry,
    LedgerSpent,
    StepCommitted,
)
from tests.contract import records
from tests.contract.records import RUN

NOW = 5000.0


def num_rows(engine: Engine, table: str) -> int:
    with engine.connect() as connection:
        count = select(func.count()).select_from(METADATA.tables[table])
        return connection.scalar(count) or 0


def of_kind(entries: list[JournalEntry], kind: type) -> list[JournalEntry]:
    return [entry for entry in entries if isinstance(entry, kind)]


def test_what_was_written_is_read(engine: Engine) -> None:
    writer, history = HistoryWriter(engine), History(engine, clock=lambda: NOW)
    entries = [*records.journal(200), records.ended(201)]
    assert writer.position(RUN) == 0
    assert writer.write(RUN, entries, NOW) == 201
    assert writer.position(RUN) == 201
    assert history.events(RUN) == of_kind(entries, EventHappened)
    assert history.generations(RUN) == of_kind(entries, GenerationFormed)
    assert history.decisions(RUN) == of_kind(entries, DecisionMade)
    assert history.ledger_intervals(RUN) == of_kind(entries, LedgerSpent)
    assert [p.id for p in history.proposals(RUN)] == [f"p-{seq}" for seq in range(6, 100, 10)]
    steps = of_kind(entries, StepCommitted)
    series = history.steps(RUN)
    assert series.step.tolist() == [entry.step for entry in steps]
    np.testing.assert_array_equal(series.loss, [entry.loss for entry in steps])
    np.testing.assert_array_equal(series.tokens_per_s, np.full(len(steps), 2048.0))
    detail = history.run(RUN)
    assert detail is not None
    assert (detail.config, detail.seq_len, detail.status) == ('{"name":"demo"}', 64, "stopped")
    assert (detail.steps, detail.num_generations) == (len(steps), 1)
    assert (detail.num_missing, detail.num_bad_records) == (0, 0)
    assert history.list_runs()[0].run == RUN
    assert history.ledger(RUN)["productive"] == pytest.approx(10.0 * 20)


def test_an_unknown_run_is_empty_everywhere(engine: Engine) -> None:
    history = History(engine)
    assert history.list_runs() == []
    assert history.run("none") is None
    assert len(history.steps("none")) == 0
    assert history.events("none") == []
    assert history.proposals("none") == []
    assert sum(history.ledger("none").values()) == 0


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 120)), max_size=8))
def test_writing_again_changes_nothing(engine: Engine, cuts: list[tuple[int, int]]) -> None:
    """Any slices, in any order, over and over: the tables end up as after one clean pass."""
    run = f"run-{num_rows(engine, 'runs')}"
    entries = [msgspec.structs.replace(entry, run=run) for entry in records.journal(120)]
    writer, history = HistoryWriter(engine), History(engine)
    for begin, end in cuts:
        part = entries[begin:end]
        # The live store never hands out what leaves a gap that it could still fill
        if part and part[0].seq <= writer.position(run) + 1:
            writer.write(run, part, NOW)
    writer.write(run, entries, NOW)
    detail, steps = history.run(run), of_kind(entries, StepCommitted)
    assert detail is not None
    assert detail.steps == len(steps) == len(history.steps(run))
    assert detail.tokens == 1024 * len(steps)
    assert history.ledger(run)["productive"] == pytest.approx(120.0)
    assert len(history.events(run)) == len(of_kind(entries, EventHappened))


def test_a_step_committed_again_is_one_step(engine: Engine) -> None:
    writer, history = HistoryWriter(engine), History(engine)
    writer.write(RUN, [records.started(), records.step(2, step=0), records.step(3, step=1)], NOW)
    again = [records.step(4, step=1, loss=0.25), records.step(5, step=1, loss=0.125)]
    writer.write(RUN, [*again, records.step(6, step=2)], NOW)
    series = history.steps(RUN)
    assert series.step.tolist() == [0, 1, 2]
    assert series.loss[1] == 0.125
    detail = history.run(RUN)
    assert detail is not None
    assert (detail.steps, detail.tokens, detail.last_step) == (3, 3 * 1024, 2)


def test_two_writers_do_not_count_twice(engine: Engine) -> None:
    entries = records.journal(400)
    parts = [entries[begin : begin + 40] for begin in range(0, 400, 40)]

    def record_all(writer: HistoryWriter) -> None:
        for part in parts:
            writer.write(RUN, part, NOW)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(record_all, [HistoryWriter(engine), HistoryWriter(engine)]))
    detail = History(engine).run(RUN)
    assert detail is not None
    assert detail.steps == len(of_kind(entries, StepCommitted))
    assert detail.ledger["productive"] == pytest.approx(10.0 * 40)


def test_what_the_database_refuses_is_set_aside(engine: Engine) -> None:
    """A value out of range must not stop the journal; both databases have some."""
    entries = [
        records.started(),
        records.formed(2, bytes_moved=2**64 - 1),
        records.event(3, message="a\0b"),
        records.step(4, loss=float("nan"), grad_norm=float("inf")),
        BadEntry(seq=5, at=NOW, error="no such field", body=b"\0\xff" * 100_000),
        records.event(6),
    ]
    assert HistoryWriter(engine).write(RUN, entries, NOW) == 6
    history = History(engine)
    detail = history.run(RUN)
    assert detail is not None
    with engine.connect() as connection:
        kept = connection.execute(select(BAD_RECORDS).order_by(BAD_RECORDS.c.seq)).all()
    assert detail.num_bad_records == len(kept) >= 2
    assert {2, 5} <= {row.seq for row in kept}
    assert len(kept[-1].body) == 64 * 1024
    assert [event.seq for event in history.events(RUN) if event.kind == "bad_record"] == [
        row.seq for row in kept
    ]
    assert history.events(RUN)[-1] == records.event(6)
    series = history.steps(RUN)
    assert np.isnan(series.loss).all()
    assert np.isnan(series.grad_norm).all()
    assert detail.last_loss is None


def test_a_gap_is_an_event(engine: Engine) -> None:
    writer, history = HistoryWriter(engine), History(engine)
    writer.write(RUN, [records.step(3), records.step(4), records.step(8)], NOW)
    writer.write(RUN, [records.step(10)], NOW)
    events = history.events(RUN)
    assert [(event.seq, event.kind, event.details) for event in events] == [
        (1, "journal_gap", {"begin": 1, "end": 3}),
        (5, "journal_gap", {"begin": 5, "end": 8}),
        (9, "journal_gap", {"begin": 9, "end": 10}),
    ]
    detail = history.run(RUN)
    assert detail is not None
    # Without its first entry the run is still shown, by its id
    assert (detail.num_missing, detail.name, detail.status) == (6, RUN, "silent")


def test_a_run_without_an_end_is_silent_after_a_while(engine: Engine) -> None:
    entries = records.journal(20)
    HistoryWriter(engine).write(RUN, entries, NOW)
    last_at = max(entry.at for entry in entries)
    soon = History(engine, clock=lambda: last_at + SILENT_S).run(RUN)
    late = History(engine, clock=lambda: last_at + 10 * SILENT_S).run(RUN)
    assert soon is not None
    assert late is not None
    assert (soon.status, late.status) == ("running", "silent")
    assert late.status_reason
    assert late.wall_s == soon.wall_s == last_at - 1000.0


def test_goodput_from_the_ledger(engine: Engine) -> None:
    entries = [
        records.started(at=0.0),
        records.step(2, tokens=800),
        records.step(3, tokens=100),
        records.spent(4, 0.0, 8.0, tokens=800),
        records.spent(5, 8.0, 10.0, bucket="degraded", tokens=100),
        records.ended(6, at=10.0, status="failed"),
    ]
    HistoryWriter(engine).write(RUN, entries, NOW)
    (run,) = History(engine).list_runs()
    assert run.wall_s == sum(run.ledger.values()) == 10.0
    assert run.time_goodput == pytest.approx(0.8)
    assert run.token_goodput == pytest.approx(0.9)
    assert run.status == "failed"


def test_long_series_are_thinned_but_keep_both_ends(engine: Engine) -> None:
    entries = [records.step(seq, step=seq * 3) for seq in range(1, 5001)]
    HistoryWriter(engine).write(RUN, entries, NOW)
    history = History(engine)
    for max_points in (2, 3, 100, 2000, 4999):
        series = history.steps(RUN, max_points)
        assert 2 <= len(series) <= max_points
        assert (series.step[0], series.step[-1]) == (3, 15000)
        assert np.all(np.diff(series.step) > 0)
    assert len(history.steps(RUN, 5000)) == 5000


def test_runs_are_found_by_name_and_bounded(engine: Engine) -> None:
    writer = HistoryWriter(engine)
    for number in range(5):
        run = f"run-{number}"
        name = "100%_Done" if number == 3 else f"demo {number}"
        writer.write(run, [records.started(run=run, name=name, at=float(number))], NOW)
    history = History(engine)
    assert [run.run for run in history.list_runs(limit=2)] == ["run-4", "run-3"]
    assert [run.run for run in history.list_runs(search="100%_done")] == ["run-3"]
    assert history.list_runs(search="%") == history.list_runs(search="100")
    assert [run.run for run in history.list_runs(search="RUN-2")] == ["run-2"]
    assert history.list_runs(limit=0) == []


def test_a_proposal_is_shown_as_it_stood_last(engine: Engine) -> None:
    changes = [
        records.proposed(1),
        records.proposed(2, id="p-2", created_at=2000.0),
        records.proposed(3, revision=2, state="approved", decided_by="ana", chosen=0),
        records.proposed(4, revision=2, state="approved", decided_by="ana", chosen=0),
    ]
    HistoryWriter(engine).write(RUN, changes, NOW)
    first, second = History(engine).proposals(RUN)
    assert (first.id, first.state, first.decided_by) == ("p-1", "approved", "ana")
    assert first.options[2].step_s == float("inf")
    assert (second.id, second.state) == ("p-2", "open")


def test_old_steps_are_thinned_and_nothing_else(engine: Engine) -> None:
    old = [records.step(seq, at=float(seq)) for seq in range(1, 601)]
    recent = [records.step(seq, at=2e6 + seq) for seq in range(601, 701)]
    others = [records.event(701, at=2.0), records.spent(702, 0.0, 9.0), records.decision(703)]
    HistoryWriter(engine).write(RUN, [*old, *recent, *others], NOW)
    now = 2e6 + 1000
    removed = retention.thin_steps(engine, now)
    history = History(engine)
    series = history.steps(RUN)
    num_old = int(np.sum(series.at < 1e6))
    assert num_old in (10, 11)
    assert removed == 600 - num_old
    assert int(np.sum(series.at >= 1e6)) == 100
    assert retention.thin_steps(engine, now) == 0
    assert len(history.events(RUN)) == len(history.decisions(RUN)) == 1
    assert history.ledger(RUN)["productive"] == 9.0
    detail = history.run(RUN)
    assert detail is not None
    assert detail.steps == 700, "what was counted stays counted"
    # A run that ended long ago keeps its end
    retention.thin_steps(engine, now + 1e7)
    assert history.steps(RUN).step[-1] == recent[-1].step


def test_totals_agree_with_the_intervals(engine: Engine) -> None:
    HistoryWriter(engine).write(RUN, records.journal(300), NOW)
    with engine.connect() as connection:
        spent = connection.scalar(select(func.sum(LEDGER.c.end_at - LEDGER.c.begin_at)))
    assert sum(History(engine).ledger(RUN).values()) == pytest.approx(spent)


def test_a_failed_transaction_leaves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("storage.history.writer._summarise", fail)
    with pytest.raises(KeyboardInterrupt):
        HistoryWriter(engine).write(RUN, records.journal(50), NOW)
    assert {name: num_rows(engine, name) for name in METADATA.tables} == dict.fromkeys(
        METADATA.tables, 0
    )


def test_a_database_that_is_away_is_history_down() -> None:
    for url in (
        "postgresql+psycopg://u:s3cret@/nothing?host=/nonexistent",
        "sqlite:////nonexistent/history.db",
        "odd://h/db",
    ):
        with pytest.raises(HistoryDown) as caught:
            History.open(url).list_runs()
        assert "s3cret" not in str(caught.value)


def test_a_locked_sqlite_is_history_down_and_loses_nothing(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.history.database._BUSY_TIMEOUT_MS", 50)
    url = f"sqlite:///{tmp_path}/history.db"
    engine, other = open_history(url), open_history(url)
    upgrade(engine)
    writer = HistoryWriter(engine)
    with other.connect() as holder:
        holder.exec_driver_sql("UPDATE positions SET seq = 0")
        holder.exec_driver_sql("DELETE FROM positions")
        holder.execute(text("INSERT INTO positions VALUES ('x', 1, 1.0)"))
        with pytest.raises(HistoryDown, match="locked"):
            writer.write(RUN, records.journal(10), NOW)
        assert History(engine).list_runs() == [], "readers are not locked out"
        holder.rollback()
    assert writer.write(RUN, records.journal(10), NOW) == 10
    with engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(POSITIONS)) == 1
        assert connection.scalar(select(func.count()).select_from(STEPS)) == 4
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    engine.dispose()
    other.dispose()
