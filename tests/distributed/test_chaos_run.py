"""Workers of a real run lost at every point of the engine's list: controller, agent and policy act.

`Trial.check` says afterwards that no step was lost or applied twice and no sample skipped, and that
the losses are those of an undisturbed process. `test_chaos` takes every way to fail and pairs.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from runtime.config import PolicyConfig
from runtime.engine.fail_points import Point
from runtime.health.config import HealthConfig
from tests.support.chaos_worker import Traps
from tests.support.control_run import Trial, run_config, trial

# The one that is stopped, and the one whose death first makes a generation be entered.
VICTIM, OTHER = "rack-1/0", "rack-0/1"
WHOLE = [(0, 1), (0, 1), (0, 1)]
CONFIG = msgspec.structs.replace(
    run_config(2, 2, 2, step_s=0.05),
    policy=PolicyConfig(shrink="auto", grow="auto"),
    # On busy cores, slots of such short steps are slow at times, and policy would leave them out.
    health=HealthConfig(slow_ratio=10.0),
)


def on_the_way(point: Point) -> bool:
    """Whether a generation has to be entered for the point to be passed."""
    return point.startswith(("enter.", "move.", "roll."))


def stop_at(made: Trial, traps: Traps, point: Point, action: str) -> None:
    """Have the victim stopped at `point`, and wait until the run trains without it."""
    pid = made.drill.pids()[VICTIM]
    if point.startswith("roll."):
        traps.set(VICTIM, Point.AFTER_COMMIT, "hold")
        made.until(lambda: traps.fired(VICTIM, Point.AFTER_COMMIT), "a commit to stop after")
    traps.set(VICTIM, point, action)
    if on_the_way(point):
        made.kill(OTHER)
    if point.startswith("roll."):
        # Whoever can has applied the step by now: nobody waits for the one that is held.
        made.until(lambda: made.coordinator.phase == "leaving", "an abort")
        traps.release(VICTIM)
    made.until(lambda: traps.fired(VICTIM, point), f"a pass of {point}")
    made.until(lambda: made.drill.pids().get(VICTIM) != pid, f"the end of {VICTIM}")
    made.more_steps(1)


def mend(made: Trial) -> None:
    """Bring back who died, and wait until all replicas are whole and train."""
    for gpu in (VICTIM, OTHER):
        if gpu not in made.drill.pids():
            made.repair(gpu)
    made.until(lambda: made.shape() == WHOLE and made.coordinator.phase == "training", "all whole")
    made.more_steps(1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("action", "points"),
    [
        ("kill", tuple(Point)),
        # Each is fenced after the step deadline: a few are enough here.
        ("hang", (Point.AFTER_FORWARD, Point.BEFORE_APPLY, Point.MOVE_POSTED)),
    ],
    ids=["kill", "hang"],
)
def test_a_run_goes_on_wherever_a_worker_stops(
    tmp_path: Path, action: str, points: tuple[Point, ...]
) -> None:
    traps = Traps(tmp_path / "traps")
    with trial(CONFIG, tmp_path / "home", entry=traps.entry) as made:
        for point in points:
            stop_at(made, traps, point, action)
            mend(made)
        made.stop()
    made.check()
