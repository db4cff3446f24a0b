"""Chart payloads: what goes into the chart component. Pure: numbers in, traces and layout out.

Colours that depend on the theme are set in the browser. A chart carries at most `MAX_POINTS` points
a line, thinned at fixed steps, so that points do not wander from tick to tick.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from app.palette import BOOSTED, HEALTHY, NEUTRAL
from app.tail import StepSeries

MAX_POINTS = 1000


def encoded(values: npt.NDArray[Any]) -> dict[str, str]:
    """Plotly's typed array: base64 of little-endian numbers, a third of the size of JSON."""
    kind = "i4" if values.dtype.kind in "iu" else "f4"
    data = values.astype(f"<{kind}").tobytes()
    return {"dtype": kind, "bdata": base64.b64encode(data).decode()}


def thinned(step: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which points to draw: every 2^k-th step, and always the newest."""
    stride = 1
    while len(step) / stride > MAX_POINTS:
        stride *= 2
    keep: npt.NDArray[np.bool_] = step % stride == 0
    if len(keep):
        keep[-1] = True
    return keep


def loss_and_pace(series: StepSeries, ideal_tokens_per_s: float, height: int) -> dict[str, Any]:
    """Loss above, tokens/s below, over steps; zooming one zooms both. Lines where generations
    begin.
    """
    keep = thinned(series.step)
    x = encoded(series.step[keep])
    traces: list[dict[str, Any]] = [
        _line(x, encoded(series.loss[keep]), "loss", BOOSTED, "y", "%{y:.4f}"),
        _line(x, encoded(series.tokens_per_s[keep]), "tokens/s", HEALTHY, "y2", "%{y:,.0f}"),
    ]
    shapes, notes = generation_lines(series.generations, series.step)
    if ideal_tokens_per_s > 0:
        shapes.append(
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "yref": "y2",
                "y0": ideal_tokens_per_s,
                "y1": ideal_tokens_per_s,
                "line": {"dash": "dot", "width": 1, "color": NEUTRAL},
            }
        )
    layout = {
        "xaxis": {"anchor": "y2", "title": {"text": "step"}},
        "yaxis": {"domain": [0.5, 1], "title": {"text": "loss"}},
        "yaxis2": {"domain": [0, 0.44], "title": {"text": "tokens/s"}, "rangemode": "tozero"},
        "shapes": shapes,
        "annotations": notes,
    }
    return {
        "traces": traces,
        "layout": layout,
        "height": height,
        "toolbar": True,
        "label": "Loss and tokens per second over steps",
    }


def generation_lines(
    generations: tuple[tuple[int, int, str], ...], step: npt.NDArray[np.int64]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A thin line with `g3` where a generation begins, for the generations within `step`."""
    if not len(step):
        return [], []
    inside = [one for one in generations if step[0] < one[0] <= step[-1]][-20:]
    room = 0.03 * float(step[-1] - step[0])
    lines = [
        {
            "type": "line",
            "x0": first,
            "x1": first,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"width": 1, "color": NEUTRAL},
        }
        for first, _, _ in inside
    ]
    notes = [
        {
            "x": first,
            "yref": "paper",
            "y": 1,
            "text": f"g{number}",
            "hovertext": cause,
            "showarrow": False,
            "xanchor": "left",
            "yanchor": "top",
            "font": {"size": 11},
        }
        for place, (first, number, cause) in enumerate(inside)
        # Where generations follow each other closely, the last of them is named
        if place + 1 == len(inside) or inside[place + 1][0] - first > room
    ]
    return lines, notes


def gpu_series(
    at: npt.NDArray[np.float64],
    columns: dict[str, tuple[npt.NDArray[np.float32], str]],
    height: int,
) -> dict[str, Any]:
    """A GPU's last minutes: one small panel a quantity, over seconds before now."""
    ago = at - at[-1] if len(at) else at
    count = len(columns)
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "xaxis": {"anchor": f"y{count}", "title": {"text": "seconds before now"}}
    }
    for index, (name, (values, unit)) in enumerate(columns.items()):
        suffix = "" if index == 0 else str(index + 1)
        top = 1 - index / count
        layout[f"yaxis{suffix}"] = {
            "domain": [top - 1 / count + 0.06, top],
            "title": {"text": unit},
            "nticks": 3,
        }
        traces.append(
            _line(encoded(ago), encoded(values), name, BOOSTED, f"y{suffix}", f"%{{y:.0f}} {unit}")
        )
    return {
        "traces": traces,
        "layout": layout,
        "height": height,
        "toolbar": False,
        "label": "Recent history of the GPU",
    }


def _line(
    x: dict[str, str], y: dict[str, str], name: str, colour: str, axis: str, hover: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "name": name,
        "yaxis": axis,
        "line": {"width": 1.6, "color": colour},
        "hovertemplate": f"{hover}<extra>{name}</extra>",
    }
