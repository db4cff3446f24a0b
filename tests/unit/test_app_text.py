"""What stands on screen: numbers, states and their colours."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from app import words
from app.palette import (
    BOOSTED,
    BUCKET_LOOKS,
    CELL_LOOKS,
    DEGRADED,
    FAILED,
    HEALTHY,
    PROPOSAL_LOOKS,
    SUSPECT,
)
from app.proposal_card import life
from storage.records import BUCKETS, GPU_STATES

STATES = {
    "healthy": HEALTHY,
    "suspect": SUSPECT,
    "degraded": DEGRADED,
    "failed": FAILED,
    "boosted": BOOSTED,
}
# Viénot, Brettel and Mollon 1999, and the identity, on linear RGB
EYES = {
    "usual": np.eye(3),
    "protan": np.array(
        [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]]
    ),
    "deutan": np.array(
        [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]]
    ),
}


def _linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def _lab(linear: np.ndarray) -> np.ndarray:
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = np.cbrt(np.clip(to_xyz @ linear, 0, None) / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * xyz[1] - 16, 500 * (xyz[0] - xyz[1]), 200 * (xyz[1] - xyz[2])])


def _luminance(colour: str) -> float:
    return float(np.array([0.2126, 0.7152, 0.0722]) @ _linear(colour))


@pytest.mark.parametrize("eye", EYES)
def test_state_colours_stay_apart(eye: str) -> None:
    for one, other in itertools.combinations(STATES, 2):
        distance = np.linalg.norm(
            _lab(EYES[eye] @ _linear(STATES[one])) - _lab(EYES[eye] @ _linear(STATES[other]))
        )
        assert distance > 22, f"{one} and {other} look alike to {eye} eyes: {distance:.0f}"


@pytest.mark.parametrize("background", ["#ffffff", "#14171b"])
@pytest.mark.parametrize("state", STATES)
def test_state_colours_stand_out(state: str, background: str) -> None:
    low, high = sorted((_luminance(STATES[state]), _luminance(background)))
    # 2.5 rather than 3: amber on white has its mark, in black, at 7:1
    assert (high + 0.05) / (low + 0.05) > 2.5


def test_every_state_has_a_mark_of_its_own() -> None:
    marks = [look.mark for look in CELL_LOOKS.values()]
    assert len(set(marks)) == len(marks)
    assert tuple(CELL_LOOKS)[: len(GPU_STATES)] == GPU_STATES
    assert set(BUCKET_LOOKS) == set(BUCKETS)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(12345.678, 1, "12 345.7"), (None, 2, "–"), (float("nan"), 0, "nan"), (0.5, 4, "0.5000")],
)
def test_number(value: float | None, digits: int, text: str) -> None:
    assert words.number(value, digits) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.982, "98.2 %"), (0.99999, "99.9 %"), (1.0, "100.0 %"), (None, "–")]
)
def test_percent_never_rounds_up_to_all(share: float | None, text: str) -> None:
    assert words.percent(share) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.841, "0.84 s"), (12.34, "12.3 s"), (245.0, "4 min 05 s"), (7800.0, "2 h 10 min")],
)
def test_seconds(value: float, text: str) -> None:
    assert words.seconds(value) == text


def test_life_of_a_proposal() -> None:
    assert life("applying") == [
        ["open", "past"],
        ["approved", "past"],
        ["applying", "now"],
        ["applied", "ahead"],
    ]
    assert life("stale") == [["open", "past"], ["stale", "now"]]
    for state in PROPOSAL_LOOKS:
        assert [state, "now"] in life(state)
