"""Sums per minute and hour, filters, notes and tags, over SQLite and PostgreSQL."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, func, select

from storage.history import notes, retention, series
from storage.history.queries import SILENT_S, History
from storage.history.tables import ROLLUPS, STEPS
from storage.history.writer import HistoryWriter
from tests.contract import records
from tests.contract.records import RUN

NOW = 5000.0


def sums(engine: Engine, span_s: int, run: str = RUN) -> dict[tuple[int, int], tuple[float, ...]]:
    """(begin, generation) -> num_steps, tokens, step_s, loss_sum; empty ones left out."""
    query = select(ROLLUPS).where(ROLLUPS.c.run == run, ROLLUPS.c.span_s == span_s)
    with engine.connect() as connection:
        rows = connection.execute(query).all()
    return {
        (row.begin, row.generation): (row.num_steps, row.tokens, row.step_s, row.loss_sum)
        for row in rows
        if row.num_steps
    }


def expected(engine: Engine, span_s: int, run: str) -> dict[tuple[int, int], tuple[float, ...]]:
    found: dict[tuple[int, int], list[float]] = {}
    with engine.connect() as connection:
        for row in connection.execute(select(STEPS).where(STEPS.c.run == run)):
            key = (int(row.at // span_s) * span_s, row.generation)
            total = found.setdefault(key, [0, 0, 0.0, 0.0])
            for index, value in enumerate((1, row.tokens, row.step_s, row.loss)):
                total[index] += value
    return {key: tuple(total) for key, total in found.items()}


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    numbers=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 300)), min_size=1, max_size=40),
    cut=st.integers(1, 40),
)
def test_sums_equal_the_steps_whatever_is_committed_again(
    engine: Engine, numbers: list[tuple[int, int]], cut: int
) -> None:
    with engine.connect() as connection:
        run = f"run-{connection.scalar(select(func.count(ROLLUPS.c.run.distinct())))}"
    entries = [
        records.step(seq, run=run, step=step, at=1000.0 + at, generation=1 + seq // 9)
        for seq, (step, at) in enumerate(numbers, start=1)
    ]
    writer = HistoryWriter(engine)
    for part in (entries[:cut], entries[cut:], entries):
        if part:
            writer.write(run, part, NOW)
    for span_s in (60, 3600):
        there, wanted = sums(engine, span_s, run), expected(engine, span_s, run)
        assert there.keys() == wanted.keys()
        for key, values in wanted.items():
            assert there[key] == pytest.approx(values)


def test_a_long_run_is_drawn_from_minutes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [records.step(seq, step=seq, at=6000.0 + seq) for seq in range(1, 1801)]
    HistoryWriter(engine).write(RUN, entries, NOW)
    history = History(engine)
    every = history.steps(RUN, 5000)
    assert (every.span_s, len(every), every.tokens[-1]) == (0, 1800, 1800 * 1024)
    monkeypatch.setattr(series, "MAX_RAW", 100)
    minutes = history.steps(RUN)
    assert (minutes.span_s, minutes.step[-1]) == (60, 1800)
    assert len(minutes) in (30, 31)
    assert minutes.tokens[-1] == 1800 * 1024
    np.testing.assert_allclose(minutes.tokens_per_s, 2048.0)
    few = history.steps(RUN, 10)
    assert len(few) <= 10
    assert few.tokens[-1] == 1800 * 1024
    monkeypatch.setattr(series, "MAX_SUMS", 5)
    assert history.steps(RUN).span_s == 3600
    assert history.paces(RUN)[1].num_steps == 1800


def test_minutes_are_let_go_and_hours_stay(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [records.step(seq, step=seq, at=10.0 * seq) for seq in range(1, 1801)]
    HistoryWriter(engine).write(RUN, entries, NOW)
    retention.thin_steps(engine, 20_000.0 + retention.MINUTES_S)
    assert sums(engine, 60) == {}
    assert len(sums(engine, 3600)) == 6
    monkeypatch.setattr(series, "MAX_RAW", 100)
    assert History(engine).steps(RUN).span_s == 3600


def test_runs_are_filtered(engine: Engine) -> None:
    writer = HistoryWriter(engine)
    for number in range(4):
        run = f"run-{number}"
        writer.write(run, [records.started(run=run, at=1000.0 * number)], NOW)
    writer.write("run-1", [records.ended(2, run="run-1", at=1100.0, status="failed")], NOW)
    notes.set_tags(engine, "run-2", ["golden"], who="ann", at=NOW)
    history = History(engine, clock=lambda: 3000.0 + SILENT_S / 2)

    def found(**filters: object) -> list[str]:
        return [run.run for run in history.list_runs(**filters)]  # type: ignore[arg-type]

    assert found(statuses=["failed"]) == ["run-1"]
    assert found(statuses=["silent"]) == ["run-2", "run-0"]
    assert found(statuses=["starting", "silent"]) == ["run-3", "run-2", "run-0"]
    assert found(since=2000.0) == ["run-3", "run-2"]
    assert found(tag="golden") == found(search="GOLD") == ["run-2"]
    assert history.list_runs(tag="golden")[0].tags == ("golden",)


def test_notes_and_tags(engine: Engine) -> None:
    note = notes.Note(id="n1", at=1.0, who="ann", text="x" * 5000)
    for _ in range(2):
        notes.add_note(engine, RUN, note)
    notes.add_note(engine, RUN, notes.Note(id="n2", at=2.0, who="bob", text="later"))
    assert [one.id for one in notes.notes_of(engine, RUN)] == ["n2", "n1"]
    assert len(notes.notes_of(engine, RUN)[1].text) == notes.MAX_TEXT
    notes.set_tags(engine, RUN, [" b ", "a", "", "a"], who="ann", at=1.0)
    assert notes.tags_of(engine, RUN) == ["a", "b"]
    notes.set_tags(engine, RUN, ["b"], who="ann", at=2.0)
    assert notes.all_tags(engine) == ["b"]
    notes.set_tags(engine, RUN, [], who="ann", at=3.0)
    assert notes.tags_of(engine, RUN) == []


def test_steps_are_exported_whole(engine: Engine) -> None:
    entries = [records.step(seq, step=seq) for seq in range(1, 31)]
    HistoryWriter(engine).write(RUN, entries, NOW)
    columns = History(engine).step_columns(RUN)
    assert columns["step"] == list(range(1, 31))
    assert set(columns) >= {"loss", "tokens", "step_s", "exposed_sync_s", "generation"}
    assert History(engine).step_columns("none")["step"] == []
