"""Chart payloads of the History page: loss over a whole run, and its shape over time. Pure."""

from __future__ import annotations

from typing import Any

from app.figures import loss_and_pace
from app.line import on_the_line
from app.lookback import PastRun
from app.palette import DEGRADED, HEALTHY, NEUTRAL
from app.tail import StepSeries
from storage.records import GenerationFormed, ReplicaState

ROW_PX = 34


def past_loss(past: PastRun, height: int) -> dict[str, Any]:
    """Loss and tokens/s over the steps of the run, with a line where a generation began."""
    series = StepSeries(
        step=past.steps.step,
        loss=past.steps.loss,
        tokens_per_s=past.steps.tokens_per_s,
        generations=tuple(
            (one.first_step, one.generation, one.cause) for one in on_the_line(past.generations)
        ),
    )
    return loss_and_pace(series, 0.0, height)


def shape_over_time(past: PastRun) -> dict[str, Any]:
    """One row a replica, one bar a generation: how many slots were live, or left out."""
    summary = past.detail
    end = max(summary.started_at + summary.wall_s, summary.last_at)
    unit, scale = ("min", 60.0) if end - summary.started_at < 7200 else ("h", 3600.0)
    replicas = sorted({one.replica for form in past.generations for one in form.replicas})
    looks: dict[str, dict[str, list[Any]]] = {
        name: {"x": [], "y": [], "base": [], "text": [], "hovertext": []}
        for name in ("whole", "reduced", "left out")
    }
    for form, until in _spans(past.generations, end):
        for replica in form.replicas:
            kind, text = _kind(replica)
            bars = looks[kind]
            bars["base"].append((form.at - summary.started_at) / scale)
            bars["x"].append(max(0.0, until - form.at) / scale)
            bars["y"].append(f"replica {replica.replica}")
            bars["text"].append(text)
            bars["hovertext"].append(f"generation {form.generation}: {form.cause}")
    colours = {"whole": HEALTHY, "reduced": DEGRADED, "left out": NEUTRAL}
    traces = [_bars(name, bars, colours[name]) for name, bars in looks.items() if bars["y"]]
    layout = {
        "barmode": "overlay",
        "uniformtext": {"minsize": 10, "mode": "hide"},
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
        "bargap": 0.25,
        "xaxis": {"title": {"text": f"{unit} since the start"}, "rangemode": "tozero"},
        "yaxis": {
            "categoryorder": "array",
            "categoryarray": [f"replica {one}" for one in reversed(replicas)],
        },
    }
    return {
        "traces": traces,
        "layout": layout,
        "height": 90 + ROW_PX * max(1, len(replicas)),
        "toolbar": True,
        "label": "Shape of the run over time: live slots of each replica",
    }


def _spans(
    generations: tuple[GenerationFormed, ...], end: float
) -> list[tuple[GenerationFormed, float]]:
    """Each generation with the moment it ended."""
    ends = [*(one.at for one in generations[1:]), end]
    return list(zip(generations, ends, strict=True))


def _kind(replica: ReplicaState) -> tuple[str, str]:
    if replica.mode != "training":
        return "left out", "left out"
    whole = len(replica.live) == len(replica.gpus)
    return ("whole" if whole else "reduced"), f"{len(replica.live)} of {len(replica.gpus)}"


def _bars(name: str, bars: dict[str, list[Any]], colour: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "textposition": "inside",
        "textangle": 0,
        "insidetextanchor": "middle",
        "hovertemplate": "%{y}: %{text}<br>%{hovertext}<extra></extra>",
        "marker": {
            "color": colour,
            "pattern": {"shape": "/" if name == "left out" else ""},
            "line": {"width": 1, "color": colour},
        },
        **bars,
    }
