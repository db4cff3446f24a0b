"""A run that went back to a checkpoint, in the history: its line, its sums, and what it lost."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, select

from storage.history.incidents import incidents_of
from storage.history.queries import History
from storage.history.tables import ROLLUPS, SUPERSEDED_STEPS
from storage.history.writer import HistoryWriter
from storage.records import JournalEntry, RunRolledBack
from tests.contract import records
from tests.contract.records import RUN


def rolled_back(seq: int, step: int, committed: int) -> RunRolledBack:
    return RunRolledBack(
        seq=seq, at=1000.0 + seq, run=RUN, generation=1, step=step, committed=committed,
        checkpoint="/ckpt/step-5", reason="state lost",
    )  # fmt: skip


def journal() -> list[JournalEntry]:
    """Ten steps, back to step 5, three steps again."""
    entries: list[JournalEntry] = [records.started(1)]
    entries += [records.step(seq, step=seq - 2) for seq in range(2, 12)]
    entries.append(rolled_back(12, 5, 10))
    entries += [records.step(seq, step=seq - 8, loss=9.0, generation=2) for seq in range(13, 16)]
    return entries


@pytest.mark.parametrize("batch", [1, 4, 100])
def test_the_line_of_the_run_is_the_one_it_went_on_with(engine: Engine, batch: int) -> None:
    writer = HistoryWriter(engine)
    entries = journal()
    for first in range(0, len(entries), batch):
        writer.write(RUN, entries[first : first + batch], 1.0)
        writer.write(RUN, entries[max(0, first - 2) : first + batch], 1.0)
    history = History(engine)
    line = history.steps(RUN)
    assert line.step.tolist() == list(range(8))
    assert line.loss.tolist()[5:] == [9.0, 9.0, 9.0]
    assert line.generation.tolist() == [1] * 5 + [2] * 3
    run = history.run(RUN)
    assert run is not None
    assert (run.steps, run.tokens, run.last_step, run.last_loss) == (8, 8 * 1024, 7, 9.0)
    with engine.connect() as connection:
        lost = connection.execute(select(SUPERSEDED_STEPS).order_by(SUPERSEDED_STEPS.c.step)).all()
        sums = connection.execute(select(ROLLUPS).where(ROLLUPS.c.span_s == 3600)).all()
    assert [(row.step, row.seq, row.loss, row.rolled_back_seq) for row in lost] == [
        (step, step + 2, 5.0 / (step + 2), 12) for step in range(5, 10)
    ]
    assert {row.generation: (row.num_steps, row.last_step) for row in sums} == {
        1: (5, 4),
        2: (3, 7),
    }
    assert sum(row.tokens for row in sums) == 8 * 1024


def test_a_generation_that_lost_all_its_steps_leaves_no_sum(engine: Engine) -> None:
    entries = [records.started(1), records.step(2, step=0), records.step(3, step=1, generation=2)]
    entries.append(rolled_back(4, 1, 2))
    HistoryWriter(engine).write(RUN, entries, 1.0)
    assert set(History(engine).paces(RUN)) == {1}
    run = History(engine).run(RUN)
    assert run is not None
    assert (run.steps, run.last_step) == (1, 0)


def test_it_is_part_of_every_open_incident() -> None:
    failed = records.event(2, gpu="rack-0/3")
    back = records.event(
        3, kind="run_rolled_back", message="back to step 5", gpu=None, rack=None, replica=None
    )
    formed = records.formed(1, replicas=(records.replica_state(gpus=("rack-0/3", "rack-0/4")),))
    (incident,) = incidents_of([formed], [failed, back], [], [], 2000.0)
    assert "back to step 5" in [moment.text for moment in incident.moments]
