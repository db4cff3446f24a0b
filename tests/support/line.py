"""The steps that make up a run, from its journal."""

from __future__ import annotations

from collections.abc import Iterable

from storage.records import RunRolledBack, StepCommitted


def line_of(journal: Iterable[object]) -> list[StepCommitted]:
    """The steps that make up a run: without those that were lost and run again."""
    found: list[StepCommitted] = []
    for entry in journal:
        if isinstance(entry, RunRolledBack):
            found = [step for step in found if step.step < entry.step]
        elif isinstance(entry, StepCommitted):
            found.append(entry)
    return found
