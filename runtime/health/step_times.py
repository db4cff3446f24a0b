"""Step times of workers as a CSV in, rounds out: one duration a worker. Pure.

Columns are found by name: the worker (or rank, slot, gpu), the time of the sample, its duration.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from runtime.errors import CounterpoiseError
from runtime.health.observation import NotUnderstood, clipped

ROW_LIMIT = 5_000_000
KEPT_BAD = 100
_WORKERS = ("worker", "worker_id", "rank", "slot", "gpu")
_TIMES = ("time", "at", "timestamp", "step", "t")
_DURATIONS = (
    "duration", "duration_s", "duration_ms", "step_s", "step_time", "step_time_s", "share_s",
    "batch_time_norm", "batch_time", "minibatch_time", "seconds", "elapsed",
)  # fmt: skip


class StepTimesError(CounterpoiseError):
    """No CSV of step times: says which columns it has and which it should have."""


class Round(NamedTuple):
    """One sample of every worker that sent one. durations: in whatever unit the file has."""

    at: float
    durations: dict[str, float]


class StepTimes:
    """Rows of a CSV, in order of time. Bad rows are counted and kept for showing."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.num_not_understood = 0
        self.not_understood: list[NotUnderstood] = []

    def rounds(self, lines: Iterable[str]) -> Iterator[Round]:
        """Rounds of a file.

        Raises:
            StepTimesError: columns are missing.
        """
        rows = sorted(self._rows(lines), key=lambda row: row[0])
        at, durations = 0.0, dict[str, float]()
        for time, worker, duration in rows:
            if worker in durations:
                yield Round(at, durations)
                durations = {}
            if not durations:
                at = time
            durations[worker] = duration
        if durations:
            yield Round(at, durations)

    def _rows(self, lines: Iterable[str]) -> Iterator[tuple[float, str, float]]:
        reader = csv.reader(lines)
        try:
            head = [name.strip().lower() for name in next(reader, [])]
            columns = _columns(head)
            self.num_lines = 1
            for row in reader:
                self.num_lines = reader.line_num
                parsed = _parsed(row, columns)
                if parsed is not None:
                    yield parsed
                elif row:
                    self._bad(",".join(row), "is no worker, time and duration")
                if self.num_lines > ROW_LIMIT:
                    self._bad("", f"has more than {ROW_LIMIT} rows; the rest was not read")
                    return
        except csv.Error as error:
            self._bad("", f"is no CSV from here on: {error}")

    def _bad(self, text: str, reason: str) -> None:
        self.num_not_understood += 1
        if len(self.not_understood) < KEPT_BAD:
            self.not_understood.append(
                NotUnderstood(line=self.num_lines, text=clipped(text), reason=reason)
            )


def is_step_times(head: str) -> bool:
    """Whether a first line names the columns of a CSV of step times."""
    try:
        _columns([name.strip().lower() for name in next(csv.reader([head]), [])])
    except (StepTimesError, csv.Error):
        return False
    return True


def _columns(head: Sequence[str]) -> tuple[int, int, int]:
    found = []
    for what, names in (("worker", _WORKERS), ("time", _TIMES), ("duration", _DURATIONS)):
        name = next((name for name in names if name in head), None)
        if name is None:
            raise StepTimesError(
                f"no column for the {what}; the file has {', '.join(map(repr, head)) or 'none'}; "
                f"known names: {', '.join(names)}"
            )
        found.append(head.index(name))
    return found[0], found[1], found[2]


def _parsed(row: Sequence[str], columns: tuple[int, int, int]) -> tuple[float, str, float] | None:
    try:
        worker, time, duration = (row[column].strip() for column in columns)
        parsed = float(time), worker[:64], float(duration)
    except (IndexError, ValueError):
        return None
    fine = worker and math.isfinite(parsed[0]) and math.isfinite(parsed[2]) and parsed[2] >= 0
    return parsed if fine else None
