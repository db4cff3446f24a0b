"""Measures a pace-over-power curve: sweeps caps on one device and times a fixed piece of work.

Which device and which work comes in from outside. The device gets back the cap it had, whatever
happens on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from runtime.errors import PlanError
from runtime.power.curve import check_points
from runtime.power.port import CapError, PowerBackend, PowerLimits


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One cap of a sweep. pace: work per second, in any unit; drawn_w, temp_c: while it ran."""

    cap_w: float
    pace: float
    drawn_w: float
    temp_c: float


def sweep_caps(limits: PowerLimits, steps: int, low_w: float = 0.0) -> tuple[float, ...]:
    """Whole watts from `low_w` (0: half the normal cap) to the maximum, the normal cap among them.

    Raises:
        PlanError: fewer than two steps, or no room between lowest and highest.
    """
    low = max(limits.min_w, low_w or 0.5 * limits.normal_w)
    if steps < 2 or not low < limits.max_w:
        raise PlanError(f"{steps} caps from {low:g} W to {limits.max_w:g} W are no sweep")
    spaced = {
        float(round(low + (limits.max_w - low) * index / (steps - 1))) for index in range(steps)
    }
    caps = {min(limits.max_w, max(limits.min_w, cap_w)) for cap_w in spaced} | {limits.normal_w}
    return tuple(sorted(caps))


def sweep(
    backend: PowerBackend,
    caps_w: Sequence[float],
    pace: Callable[[], float],
    told: Callable[[Point], None] = lambda point: None,
) -> list[Point]:
    """Set every cap in turn and measure.

    Args:
        pace: runs the work at the present cap, long enough to settle; its pace.
        told: gets every point as it is measured.

    Raises:
        CapError: a cap could not be set; says what an administrator would run.
    """
    if backend.obstacle:
        raise CapError(f"caps cannot be swept: {backend.obstacle}")
    found_w = backend.read().cap_w
    points = []
    try:
        for cap_w in caps_w:
            backend.set_cap(cap_w)
            measured = pace()
            reading = backend.read()
            point = Point(
                cap_w=cap_w, pace=measured, drawn_w=reading.power_w, temp_c=reading.temp_c
            )
            points.append(point)
            told(point)
    finally:
        backend.set_cap(found_w)
    return points


def curve_points(points: Sequence[Point], normal_w: float) -> tuple[tuple[float, float], ...]:
    """Points relative to the normal cap, made to rise: a cap never counts slower than a lower one.

    Raises:
        PlanError: the normal cap was not measured, or a pace is no number above 0.
    """
    at_normal = [one.pace for one in points if one.cap_w == normal_w]
    if not at_normal or not 0.0 < at_normal[0] < math.inf:
        raise PlanError(f"no pace was measured at the normal cap of {normal_w:g} W")
    relative: list[tuple[float, float]] = []
    best = 0.0
    for one in sorted(points, key=lambda point: point.cap_w):
        best = max(best, one.pace / at_normal[0])
        relative.append((round(one.cap_w / normal_w, 6), round(best, 6)))
    check_points(relative)
    return tuple(relative)


def curve_file(
    points: Sequence[tuple[float, float]], *, device: str, normal_w: float, emulated: bool
) -> str:
    """The text of a curve file, for `power.curve_file`."""
    rows = "\n".join(f"    [{ratio}, {pace}]," for ratio, pace in points)
    kind = "emulated" if emulated else "measured"
    return (
        f"# Pace over power, {kind} on {device} (normal cap {normal_w:g} W), by\n"
        '# `counterpoise power calibrate`. Use it: [power] curve_file = "this file".\n'
        "# Each point: power relative to the normal cap, pace relative to the pace there.\n"
        f'device = "{device}"\n'
        f"emulated = {str(emulated).lower()}\n"
        f"normal_cap_w = {normal_w:g}\n"
        f"curve = [\n{rows}\n]\n"
    )
