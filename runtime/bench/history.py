"""History: how long the questions of the History page take over 1,000 recorded runs.

One run is recorded by the real writer and copied inside the database under other names, so that
millions of rows are there in a minute. Asked are the reads that the page makes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, Table, bindparam, func, select

from runtime.bench.benchmark import Benchmark, Figures, Say, Target
from storage.history.database import open_history, writing
from storage.history.incidents import incidents_of
from storage.history.queries import History
from storage.history.schema import upgrade
from storage.history.tables import AUDIT, METADATA, STEPS
from storage.history.writer import HistoryWriter
from storage.records import (
    EventHappened,
    GenerationFormed,
    JournalEntry,
    LedgerSpent,
    ReplicaState,
    RunEnded,
    RunStarted,
    StepCommitted,
)

NUM_RUNS = 1000
STEPS_A_RUN, STEPS_A_RUN_FULL = 1_000, 10_000
NUM_REPLICAS, NUM_SLOTS = 4, 8
COMPARED = 10
MAX_POINTS = 2000
TIMES = 7
BATCH = 5_000
DAY_S = 86_400.0
PROTOTYPE = "run-0"


def measure(say: Say) -> dict[str, Any]:
    return _measured(say, STEPS_A_RUN)


def measure_full(say: Say) -> dict[str, Any]:
    """The same over ten million step rows; takes some minutes and gigabytes."""
    return _measured(say, STEPS_A_RUN_FULL)


def _measured(say: Say, num_steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="counterpoise-") as folder:
        path = Path(folder) / "history.db"
        engine = open_history(f"sqlite:///{path}")
        upgrade(engine)
        now = time.time()
        writer, entries = HistoryWriter(engine), _journal(num_steps, now - NUM_RUNS * 3600.0)
        for begin in range(0, len(entries), BATCH):
            writer.write(PROTOTYPE, entries[begin : begin + BATCH], now)
        say(f"one run of {num_steps:,} steps is recorded; copying it {NUM_RUNS - 1} times")
        _copy(engine, NUM_RUNS)
        num_rows = _count(engine)
        say(f"{num_rows:,} step rows, {path.stat().st_size / 2**30:.1f} GiB")
        history = History(engine)
        figures = {f"{name}_ms": _median_ms(ask) for name, ask in _questions(history, now).items()}
        engine.dispose()
        return {
            "runs": NUM_RUNS,
            "step_rows": num_rows,
            "database_mb": round(path.stat().st_size / 2**20),
            **figures,
        }


def _questions(history: History, now: float) -> dict[str, Callable[[], object]]:
    compared = [f"run-{number * 97 + 1}" for number in range(COMPARED)]
    last = f"run-{NUM_RUNS - 1}"
    return {
        "list": lambda: history.list_runs(51),
        "search": lambda: history.list_runs(51, "un-77"),
        "filter": lambda: history.list_runs(
            51, "run", statuses=("stopped", "silent"), since=now - 7 * DAY_S
        ),
        "list_all": lambda: history.list_runs(NUM_RUNS),
        "one_run": lambda: _one(history, last),
        "incidents": lambda: _incidents(history, last, now),
        "compare_10": lambda: [_one(history, run) for run in compared],
        "export": lambda: history.step_columns(last),
    }


def _one(history: History, run: str) -> object:
    """What the page reads of a run."""
    return (
        history.run(run),
        history.steps(run, MAX_POINTS),
        history.generations(run),
        history.paces(run),
        history.events(run),
        history.proposals(run),
        history.decisions(run),
    )


def _incidents(history: History, run: str, now: float) -> object:
    found = incidents_of(
        history.generations(run),
        history.events(run, 5000),
        history.proposals(run),
        history.decisions(run),
        now,
    )
    return found, history.ledger_intervals(run), history.paces(run)


def _median_ms(ask: Callable[[], object]) -> float:
    took = []
    for _ in range(TIMES):
        began = time.perf_counter()
        ask()
        took.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(took), 1)


def _journal(num_steps: int, began: float) -> list[JournalEntry]:
    """A run with a GPU that fails and comes back every 500 steps."""
    run = PROTOTYPE
    entries: list[JournalEntry] = [
        RunStarted(
            seq=1, at=began, run=run, name="bench", emulated=True, device="emulated B200",
            config="{}", seq_len=512, global_batch=32, num_params=1_000_000,
        )
    ]  # fmt: skip
    samples = tuple((one, one * 8, 8) for one in range(NUM_REPLICAS))
    generation = 0
    for step in range(num_steps):
        at, seq = began + 0.3 * step, entries[-1].seq
        if step % 250 == 0:
            generation, lost = generation + 1, (step // 250) % 2
            if step:
                kind, level = ("gpu_failed", "critical") if lost else ("gpu_repaired", "info")
                seq += 1
                entries.append(
                    EventHappened(
                        seq=seq, at=at, run=run, kind=kind, severity=level,  # type: ignore[arg-type]
                        message=f"r1/3: {kind}", generation=generation, replica=1, gpu="r1/3",
                    )
                )  # fmt: skip
            seq += 1
            entries.append(
                GenerationFormed(
                    seq=seq, at=at, run=run, generation=generation, first_step=step,
                    replicas=_replicas(lost), cause="bench",
                )
            )  # fmt: skip
        entries.append(
            StepCommitted(
                seq=seq + 1, at=at, run=run, step=step, generation=generation,
                loss=5.0 / (1 + step / 100), grad_norm=1.0, tokens=16_384, step_s=0.3,
                exposed_sync_s=0.01, samples=samples, replica_step_s=(0.29,) * NUM_REPLICAS,
            )
        )  # fmt: skip
        if step % 10 == 9:
            bucket = "degraded" if generation % 2 == 0 else "productive"
            entries.append(
                LedgerSpent(
                    seq=seq + 2, at=at, run=run, bucket=bucket,  # type: ignore[arg-type]
                    begin=at - 2.7, end=at + 0.3, tokens=163_840,
                )
            )  # fmt: skip
    last = entries[-1]
    entries.append(
        RunEnded(seq=last.seq + 1, at=last.at, run=run, status="stopped", reason="bench")
    )
    return entries


def _replicas(lost: int) -> tuple[ReplicaState, ...]:
    slots = tuple(range(NUM_SLOTS))
    return tuple(
        ReplicaState(
            replica=one, rack=f"r{one}", mode="training", num_samples=8, units={},
            gpus=tuple(f"r{one}/{slot}" for slot in slots),
            live=slots[:-1] if lost and one == 1 else slots,
        )
        for one in range(NUM_REPLICAS)
    )  # fmt: skip


def _copy(engine: Engine, num_runs: int) -> None:
    """The prototype under `num_runs` - 1 other names, an hour apart, in all tables but the audit
    (which is one chain)."""
    tables = [table for table in METADATA.sorted_tables if "run" in table.c and table is not AUDIT]
    statements = [(table, table.insert().from_select(*_renamed(table))) for table in tables]
    for begin in range(1, num_runs, 50):
        with writing(engine) as connection:
            for number in range(begin, min(begin + 50, num_runs)):
                for _, statement in statements:
                    connection.execute(
                        statement, {"new_run": f"run-{number}", "later_s": 3600.0 * number}
                    )


def _renamed(table: Table) -> tuple[list[str], Any]:
    """Column names, and the prototype's rows with another run and later times."""
    values: list[Any] = []
    for column in table.c:
        if column.name == "run":
            values.append(bindparam("new_run", type_=column.type))
        elif column.name in ("at", "started_at", "ended_at", "last_at", "begin_at", "end_at"):
            values.append(column + bindparam("later_s"))
        else:
            values.append(column)
    return [column.name for column in table.c], select(*values).where(table.c.run == PROTOTYPE)


def _count(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.scalar(select(func.count()).select_from(STEPS)) or 0)


def targets(_: Figures) -> list[Target]:
    return [
        Target(figure="list_ms", at_most=100.0, why="the page's own part of 300 ms"),
        Target(figure="search_ms", at_most=100.0, why="the same, while somebody types"),
        Target(figure="filter_ms", at_most=100.0, why="the same"),
        Target(figure="one_run_ms", at_most=300.0, why="a picked run feels immediate"),
        Target(figure="compare_10_ms", at_most=1500.0, why="ten runs within a breath"),
    ]


BENCHMARK = Benchmark(
    name="history",
    summary="what the History page asks of 1,000 recorded runs (--full: 10 million step rows)",
    measure=measure,
    targets=targets,
    measure_full=measure_full,
)
