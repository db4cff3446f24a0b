"""The named places of a step and of a reconfiguration at which a fault can be injected.

One list: the engine calls `FailPoints.at` with nothing else, and the chaos tests walk through all
of it, so a new place cannot be forgotten.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class Point(StrEnum):
    """In the order in which a rank passes them: a step, then the way into a generation."""

    STEP_START = "step.start"
    AFTER_FORWARD = "after_forward"
    BEFORE_SYNC = "before_sync"
    BEFORE_COMMIT = "before_commit"
    AFTER_COMMIT = "after_commit"
    BEFORE_APPLY = "before_apply"
    AFTER_APPLY = "after_apply"
    BEFORE_HASHES = "before_hashes"

    ENTER_GROUPS = "enter.groups"
    ENTER_AGREE = "enter.agree"
    # Only where the last step is rolled forward.
    ROLL_BEFORE_APPLY = "roll.before_apply"
    ROLL_AFTER_APPLY = "roll.after_apply"
    ENTER_MOVE = "enter.move"
    # Every message of the move is posted, none is waited for yet.
    MOVE_POSTED = "move.posted"
    BEFORE_SWAP = "move.before_swap"
    ENTER_READY = "enter.ready"


class FailPoints(Protocol):
    """Where faults are injected: called as the engine passes a point, on its training thread."""

    def at(self, point: Point) -> None: ...
