"""What the History page makes of a run: comparison, report, pictures, exports."""

from __future__ import annotations

import csv
import io
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.compare import along, figure, loss_at, rows
from app.exports import COLUMNS, as_csv, as_parquet
from app.history_sums import sums_of
from app.lookback import Lookback, PastIncidents, PastRun, RunQuery, with_newest
from app.queries import LiveReader
from app.report import report
from app.svg import Line, bar, line_chart, short, ticks
from storage.history.database import open_history
from storage.history.notes import Note
from storage.history.schema import upgrade
from storage.history.writer import HistoryWriter
from storage.live.memory import MemoryStore
from tests.support.feeder import Feeder


@pytest.fixture
def lookback(tmp_path: Path) -> Lookback:
    url = f"sqlite:///{tmp_path / 'history.db'}"
    engine = open_history(url)
    upgrade(engine)
    for number in range(2):
        feeder = Feeder(MemoryStore(), run=f"demo-{number}", name=f"<demo {number}>", prefill=40)
        feeder.begin()
        if number:
            feeder.fault("r1/3", "kill")
        feeder.end()
        HistoryWriter(engine).write(feeder.run, feeder.entries, time.time())
    engine.dispose()
    return Lookback(url)


def past_of(lookback: Lookback, run: str) -> PastRun:
    past = lookback.run(run)
    assert past is not None
    return past


def test_axes_begin_at_the_start_and_grow(lookback: Lookback) -> None:
    past = past_of(lookback, "demo-0")
    for axis in ("wall", "step", "tokens", "gpu_hours"):
        x = along(past, axis)
        assert len(x) == 40
        assert x[0] >= 0
        assert np.all(np.diff(x) > 0)
    assert along(past, "tokens")[-1] == pytest.approx(past.detail.tokens / 1e6)
    assert along(past, "gpu_hours")[-1] == pytest.approx(along(past, "wall")[-1] / 60 * 16)


def test_runs_are_held_against_the_baseline(lookback: Lookback) -> None:
    runs = [past_of(lookback, "demo-0"), past_of(lookback, "demo-1")]
    table = rows(runs, "demo-1", "step")
    assert [row.id for row in table] == ["demo-1", "demo-0"]
    assert table[0].strong
    assert table[0].cells[7] == "baseline"
    assert str(table[1].cells[7]).startswith(("+", "-"))
    assert loss_at(runs[0], "step", -1.0) is None
    drawn = figure(runs, "demo-1", "tokens", 300)
    assert [trace["line"]["width"] for trace in drawn["traces"]] == [1.6, 1.6, 3, 3]


def test_a_report_stands_alone_and_escapes(lookback: Lookback) -> None:
    assert lookback.add_note("demo-1", Note(id="n", at=1.0, who="ann", text="<b>odd</b>")) == ""
    assert lookback.set_tags("demo-1", ["golden"], "ann") == ""
    text = report(past_of(lookback, "demo-1"), lookback.incidents("demo-1"), 1.0, "ann")
    assert text.count("<svg") >= 4
    assert "&lt;b&gt;odd" in text
    assert "<b>odd" not in text
    assert "&lt;demo 1&gt;" in text
    assert "GPU r1/3 failed" in text
    assert "golden" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in text


def test_runs_add_up_by_their_wall_time(lookback: Lookback) -> None:
    runs = lookback.runs(RunQuery()).runs
    assert len(runs) == 2
    sums = sums_of(runs)
    assert sums.num_runs == 2
    assert sums.wall_s == pytest.approx(sum(one.wall_s for one in runs))
    assert sums.tokens == sum(one.tokens for one in runs)
    shares = [one.time_goodput or 0.0 for one in runs]
    assert min(shares) <= (sums.time_goodput or 0.0) <= max(shares)
    tokens = [one.token_goodput or 0.0 for one in runs]
    assert sums.token_goodput is not None
    assert min(tokens) <= sums.token_goodput <= max(tokens)
    assert sums.dearest is not None
    assert sums.dearest[1] == max(sums.ledger[name] for name in sums.ledger if name != "productive")
    nothing = sums_of(())
    assert (nothing.time_goodput, nothing.token_goodput, nothing.dearest) == (None, None, None)


def test_found_runs_follow_notes_and_filters(lookback: Lookback) -> None:
    assert lookback.set_tags("demo-0", ["kept"], "ann") == ""
    assert lookback.tags() == ["kept"]
    found = lookback.runs(RunQuery(tag="kept"))
    assert [run.run for run in found.runs] == ["demo-0"]
    assert lookback.runs(RunQuery(statuses=("failed",))).runs == ()


def test_steps_leave_as_csv_and_parquet(lookback: Lookback) -> None:
    import pandas as pd

    columns = lookback.step_columns("demo-0")
    read = list(csv.reader(io.StringIO(as_csv(columns).decode())))
    assert tuple(read[0]) == COLUMNS
    assert len(read) == 41
    frame = pd.read_parquet(io.BytesIO(as_parquet(columns)))
    assert list(frame["step"]) == list(range(1, 41))


def test_pictures_survive_nothing_and_nan() -> None:
    empty = np.empty(0)
    assert line_chart([Line(name="a", colour="#000", x=empty, y=empty)], "x", "y") == ""
    y = np.array([np.nan, 1.0, np.nan, 3.0])
    drawn = line_chart([Line(name="a<b", colour="#000000", x=np.arange(4.0), y=y)], "x", "y", [2.0])
    assert "a&lt;b" in drawn
    assert "nan" not in drawn
    assert ticks(0.0, 10.0) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert short(12_345.0) == "12.3k"
    assert "rect" in bar([("word", "#123456", 1.0)], "label")


def test_a_young_incident_is_shown_as_the_live_store_has_it() -> None:
    feeder = Feeder(MemoryStore(), prefill=20)
    feeder.begin()
    feeder.fault("r1/3", "kill")
    reader = LiveReader(feeder.store)
    feeder._append_all()
    feeder._publish()
    live = reader.read(feeder.run)
    (incident,) = live.recent.incidents
    until = live.updated_at
    behind = replace(incident, moments=incident.moments[:1])
    past = PastIncidents(incidents=(behind,), costs=live.recent.costs, until=until - 5.0)
    shown = with_newest(past, live.recent, until)
    assert shown.incidents == (incident,)
    assert shown.until == until
    # The history does not know it yet
    nothing = PastIncidents(incidents=(), costs={}, until=incident.begin - 1.0)
    assert with_newest(nothing, live.recent, until).incidents == (incident,)
    # It is closed there, or so old that the live store has half of it
    closed = replace(behind, end=until)
    for kept, now in ((closed, until), (behind, until + 3600.0)):
        past = PastIncidents(incidents=(kept,), costs={}, until=until)
        assert with_newest(past, live.recent, now).incidents == (kept,)
