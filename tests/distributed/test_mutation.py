"""The proofs notice defects: a fast subset of `python -m tests.mutation`, which has them all."""

from __future__ import annotations

import pytest

from tests.support.defects import DEFECTS, Defect
from tests.support.engine_proofs import caught_by

pytestmark = pytest.mark.usefixtures("one_thread")

# Those that end in a hang wait for a deadline; the others are caught at once.
FAST = frozenset({
    "sync skips a unit",
    "sync sums units of the wrong owner",
    "reshard loses a hand-over",
    "reshard does not hand back",
    "clipping by the rank's own norm",
    "norm counts every copy",
    "replicas take the same samples",
    "a sharer takes its turn too late",
    "only one of a unit's sharers is summed",
    "a slot without a turn leaves backward out",
    "stale layout on one rank",
    "moments do not move",
    "roll forward on all ranks",
    "checkpoint rows in the wrong order",
})  # fmt: skip


def test_nothing_is_caught_where_nothing_is_wrong() -> None:
    assert not caught_by()


def test_every_fast_defect_exists() -> None:
    assert {defect.name for defect in DEFECTS} >= FAST
    assert len(DEFECTS) >= 20


@pytest.mark.mutation
@pytest.mark.parametrize("defect", [d for d in DEFECTS if d.name in FAST], ids=lambda d: d.name)
def test_a_defect_is_caught(defect: Defect) -> None:
    with defect.injected():
        assert caught_by()
