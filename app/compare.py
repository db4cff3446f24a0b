"""Several runs on one axis, against a pinned baseline: chart and table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from app.components.parts import Column, Row
from app.figures import encoded
from app.lookback import PastRun
from app.words import DASH, gpu_hours, number, percent, seconds

MAX_RUNS = 10
MAX_POINTS = 600
AXES = {"wall": "Wall time", "step": "Step", "tokens": "Tokens", "gpu_hours": "GPU-hours"}
TITLES = {
    "wall": "minutes since the start",
    "step": "step",
    "tokens": "million tokens committed",
    "gpu_hours": "GPU-hours",
}
# Okabe and Ito's colours, told apart by colour-blind eyes; the dash is the second signal
COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7a00", "#7b5ea7",
    "#3f7f5f", "#a05a2c",
)  # fmt: skip
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
COLUMNS = (
    Column(label="Run", kind="wide"),
    Column(label="Steps", kind="right"),
    Column(label="Wall time", kind="right"),
    Column(label="GPU-hours", kind="right"),
    Column(label="Token goodput", kind="right"),
    Column(label="Had replicas been dropped", kind="right"),
    Column(label="Loss there", kind="right", title="where the shortest of the runs ends"),
    Column(label="Against the baseline", kind="right", title="loss, negative is better"),
    Column(label="Tokens/s", kind="right", title="mean over the run"),
    Column(label="Against the baseline", kind="right"),
)


def along(past: PastRun, axis: str) -> npt.NDArray[np.float64]:
    """Where each point of a run's steps lies on `axis`."""
    steps = past.steps
    if axis == "step":
        return steps.step.astype(np.float64)
    if axis == "tokens":
        return steps.tokens / 1e6
    elapsed_s = steps.at - past.detail.started_at
    return elapsed_s / 60 if axis == "wall" else elapsed_s * past.num_gpus / 3600


def figure(runs: Sequence[PastRun], baseline: str, axis: str, height: int) -> dict[str, Any]:
    """Loss above, tokens/s below. The baseline is drawn thick."""
    traces = []
    for index, past in enumerate(runs):
        x = along(past, axis)
        keep = np.arange(len(x)) % max(1, len(x) // MAX_POINTS) == 0
        pinned = past.detail.run == baseline
        name = past.detail.name + (" (baseline)" if pinned else "")
        line = {
            "color": COLOURS[index % len(COLOURS)],
            "width": 3 if pinned else 1.6,
            "dash": "solid" if pinned else DASHES[index % len(DASHES)],
        }
        for axis_name, values in (("y", past.steps.loss), ("y2", past.steps.tokens_per_s)):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": encoded(x[keep]),
                    "y": encoded(values[keep]),
                    "name": name,
                    "legendgroup": past.detail.run,
                    "showlegend": axis_name == "y",
                    "yaxis": axis_name,
                    "line": line,
                }
            )
    layout = {
        "xaxis": {"anchor": "y2", "title": {"text": TITLES[axis]}},
        "yaxis": {"domain": [0.5, 1], "title": {"text": "loss"}},
        "yaxis2": {"domain": [0, 0.44], "title": {"text": "tokens/s"}, "rangemode": "tozero"},
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "x",
    }
    label = f"Loss and tokens per second of {len(runs)} runs by {AXES[axis].lower()}"
    return {"traces": traces, "layout": layout, "height": height, "toolbar": True, "label": label}


def rows(runs: Sequence[PastRun], baseline: str, axis: str) -> list[Row]:
    """One row a run, the baseline first; loss is compared where the shortest run ends."""
    ends = [float(along(past, axis)[-1]) for past in runs if len(past.steps)]
    at = min(ends, default=0.0)
    pinned = next((past for past in runs if past.detail.run == baseline), None)
    base_loss = loss_at(pinned, axis, at) if pinned else None
    base_pace = _pace(pinned) if pinned else None
    ordered = sorted(runs, key=lambda past: past.detail.run != baseline)
    return [_row(past, past is pinned, axis, at, base_loss, base_pace) for past in ordered]


def loss_at(past: PastRun, axis: str, at: float) -> float | None:
    """Loss of a run at a place of the axis: the mean of the last few points up to there."""
    x, loss = along(past, axis), past.steps.loss
    upto = loss[(x <= at) & np.isfinite(loss)][-5:]
    return float(upto.mean()) if len(upto) else None


def _pace(past: PastRun) -> float | None:
    return past.detail.tokens / past.detail.wall_s if past.detail.wall_s > 0 else None


def _row(
    past: PastRun,
    pinned: bool,
    axis: str,
    at: float,
    base_loss: float | None,
    base_pace: float | None,
) -> Row:
    one = past.detail
    loss, pace = loss_at(past, axis, at), _pace(past)
    by_loss = by_pace = "baseline" if pinned else DASH
    if not pinned and loss is not None and base_loss is not None:
        by_loss = f"{loss - base_loss:+.4f}"
    if not pinned and pace is not None and base_pace:
        by_pace = f"{100 * (pace / base_pace - 1):+.1f} %"
    cells = (
        {"text": one.name, "sub": one.run},
        number(one.steps),
        seconds(one.wall_s),
        gpu_hours(one.wall_s * past.num_gpus / 3600),
        percent(one.token_goodput),
        percent(past.against.dropped) if past.against else DASH,
        number(loss, 4),
        by_loss,
        number(pace),
        by_pace,
    )
    return Row(id=one.run, cells=cells, strong=pinned)
