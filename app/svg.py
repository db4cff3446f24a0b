"""Pictures for the report: line charts and bars as plain SVG text, without a browser or a library.

Pure. Colours are given; text is escaped here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT = 760, 220
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 34
MAX_POINTS = 600
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """NaN breaks it."""

    name: str
    colour: str
    x: Floats
    y: Floats


def line_chart(
    lines: Sequence[Line], x_title: str, y_title: str, marks: Sequence[float] = ()
) -> str:
    """marks: x where a thin line stands (a generation began)."""
    x_all = np.concatenate([line.x for line in lines]) if lines else np.empty(0)
    y_all = np.concatenate([line.y for line in lines]) if lines else np.empty(0)
    y_all = y_all[np.isfinite(y_all)]
    if not len(x_all) or not len(y_all):
        return ""
    x_low, x_high = float(x_all.min()), float(x_all.max())
    y_low, y_high = _padded(float(y_all.min()), float(y_all.max()))
    x_span, y_span = max(x_high - x_low, 1e-12), max(y_high - y_low, 1e-12)

    def px(value: float) -> float:
        return LEFT + (value - x_low) / x_span * (WIDTH - LEFT - RIGHT)

    def py(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_low) / y_span * (HEIGHT - TOP - BOTTOM)

    parts = [_opening(f"{y_title} over {x_title}")]
    for value in ticks(y_low, y_high):
        y = py(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{short(value)}</text>')
    for value in ticks(x_low, x_high):
        x, y = px(value), HEIGHT - BOTTOM + 16
        parts.append(f'<text x="{x:.1f}" y="{y}" class="mid">{short(value)}</text>')
    for mark in marks:
        if x_low < mark < x_high:
            parts.append(f'<path d="M{px(mark):.1f} {TOP}V{HEIGHT - BOTTOM}" class="mark"/>')
    for line in lines:
        parts.append(_path(line, px, py))
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 3}" class="mid">{escape(x_title)}</text>')
    middle = (HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(12 {middle}) rotate(-90)" class="mid">{escape(y_title)}</text>'
    )
    return "".join([*parts, "</svg>"])


def bar(parts: Sequence[tuple[str, str, float]], label: str) -> str:
    """One bar of parts (word, colour, share); the words stand in the table beside it."""
    out = [_opening(label, 28)]
    at = 0.0
    for word, colour, share in parts:
        width = share * WIDTH
        out.append(
            f'<rect x="{at:.2f}" y="2" width="{max(width, 0.6):.2f}" height="24" fill="{colour}">'
            f"<title>{escape(word)}: {100 * share:.1f} %</title></rect>"
        )
        at += width
    return "".join([*out, "</svg>"])


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` round numbers within [low, high]."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / wanted
    size = 10.0 ** np.floor(np.log10(raw))
    step = float(size * next(one for one in (1, 2, 5, 10) if one * size >= raw))
    first = np.ceil(low / step) * step
    return [float(value) for value in np.arange(first, high + step * 1e-6, step)]


def short(value: float) -> str:
    """`12k`, `1.5M`, `0.25`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _padded(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def _opening(label: str, height: int = HEIGHT) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(label, quote=True)}">'
    )


def _path(line: Line, px: Callable[[float], float], py: Callable[[float], float]) -> str:
    stride = max(1, len(line.x) // MAX_POINTS)
    keep = np.arange(len(line.x)) % stride == 0
    keep[-1] = True
    drawing, pen_up = [], True
    for x, y in zip(line.x[keep], line.y[keep], strict=True):
        if not np.isfinite(y):
            pen_up = True
            continue
        drawing.append(f"{'M' if pen_up else 'L'}{px(x):.1f} {py(y):.1f}")
        pen_up = False
    return (
        f'<path d="{"".join(drawing)}" fill="none" stroke="{line.colour}" stroke-width="1.6">'
        f"<title>{escape(line.name)}</title></path>"
    )
