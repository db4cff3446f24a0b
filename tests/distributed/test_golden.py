"""The loss curve of 100 steps is the recorded one, whatever the layout, the strategy or the moves.

`python -m tests.distributed.test_golden` writes the record anew, from one process; a change of it
is a change of what runs train and must be meant.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch

from runtime.config import Config
from runtime.engine.reference import Reference
from runtime.layout.takeover import home_holders
from runtime.layout.units import without
from tests.support.engine_checks import GQA, small_config
from tests.support.engine_pool import Part
from tests.support.engine_threads import ThreadCluster

pytestmark = pytest.mark.usefixtures("one_thread")

RECORD = Path(__file__).parent.parent / "golden" / "losses.json"
STEPS = 100
ALL = (0, 1, 2, 3)


def config(
    folder: Path,
    sync: Literal["direct", "reshard"] = "direct",
    fractional: Literal["on", "off"] = "off",
) -> Config:
    """A text that is the same everywhere, unlike the standard library's."""
    text = folder / "text"
    text.write_text(" ".join(str(n * n % 1009) for n in range(4000)))
    base = small_config(GQA, 7, sync, fractional)
    train = msgspec.structs.replace(base.train, text=str(text), state_hash_every=25)
    return msgspec.structs.replace(base, train=train)


# Layout: sync strategy, shared units, and the shape of each stretch of the 100 steps.
UNIFORM = [Part(ALL, 4), Part(ALL, 3)]
SHRUNK = [Part((0, 1, 3), 3), Part(ALL, 4)]
HOLES = without(home_holders(GQA, 4), [2])
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "4+4": ("direct", "off", [UNIFORM]),
    "4+3": ("direct", "off", [[Part(ALL, 4), Part((0, 2, 3), 3)]]),
    "4+3 reshard": ("reshard", "off", [[Part(ALL, 4), Part((0, 2, 3), 3)]]),
    "3+2 shared": ("direct", "on", [[Part((0, 2, 3), 4), Part((1, 2), 3)]]),
    "1 alone": ("direct", "off", [[Part((2,), 7), Part((), 0)]]),
    "drop, shrink, grow": (
        "direct",
        "off",
        [UNIFORM, [Part((0, 1, 3), 0, "standby", HOLES), Part(ALL, 7)], SHRUNK, UNIFORM],
    ),
    "drop, shrink, grow reshard shared": ("reshard", "on", [UNIFORM, SHRUNK, SHRUNK, UNIFORM]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_curve_of_a_layout(layout: str, tmp_path: Path) -> None:
    sync, fractional, shapes = LAYOUTS[layout]
    run = ThreadCluster(config(tmp_path, sync, fractional), [4, 4])
    losses: list[float] = []
    try:
        for parts in shapes:
            before = set(run.plan.members()) if run.plan is not None else set()
            plan = run.make_plan(parts, applied_step=len(losses))
            fresh = [gpu for gpu in plan.members() if before and gpu not in before]
            run.call({gpu: ("new", run.config, gpu, "float64") for gpu in fresh})
            run.enter(plan)
            results = run.everyone("steps", STEPS // len(shapes))
            losses += [result.loss for result in next(iter(results.values()))]
            assert all(r.hash_ok is not False for steps in results.values() for r in steps)
    finally:
        run.close()
    np.testing.assert_allclose(losses, json.loads(RECORD.read_text()), rtol=1e-8)


def test_loss_curve_of_one_process(tmp_path: Path) -> None:
    np.testing.assert_allclose(record(tmp_path), json.loads(RECORD.read_text()), rtol=1e-8)


def record(folder: Path) -> list[float]:
    reference = Reference(config(folder), dtype=torch.float64)
    return [reference.step()[0] for _ in range(STEPS)]


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        RECORD.write_text(json.dumps(record(Path(name)), indent=0) + "\n")
