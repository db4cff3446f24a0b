"""An incident on screen: a line in a list, its timeline, what its parts cost, its alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.components.parts import Column, Row, marked, picking_table, table
from app.components.registry import mount
from app.palette import MOMENT_LOOKS, PART_LOOKS, SEVERITY_LOOKS, WELL, Look, ink
from app.words import DASH, gpu_hours, percent, seconds
from storage.history.incident_costs import Cost
from storage.history.incidents import Incident

OPEN = SEVERITY_LOOKS["critical"]
LIST_COLUMNS = (
    Column(label="Began", kind="right"),
    Column(label="Incident", kind="wide"),
    Column(label="State"),
    Column(label="Lasted", kind="right"),
    Column(label="Cost", kind="right", title="what the whole run lost while it was open"),
    Column(label="Waited", kind="right", title="for decisions"),
)
PART_COLUMNS = (
    Column(label="Part"),
    Column(label="Time", kind="right"),
    Column(label="Cost", kind="right"),
    Column(label="Of the cost", kind="right"),
    Column(label="What it is", kind="wide"),
)
ALTERNATIVE_COLUMNS = (
    Column(label="It could have gone", kind="wide"),
    Column(label="Goodput", kind="right", title="while it would have stood"),
    Column(label="Would have cost", kind="right"),
    Column(label="Against what was done", kind="right"),
    Column(label="Basis", kind="wide"),
)
NONE_YET = "None. A GPU that fails or slows down begins one; it ends when its recovery is verified."


def incident_list(
    incidents: Sequence[Incident],
    costs: Mapping[str, Cost],
    until: float,
    key: str,
    *,
    selected: str | None = None,
    max_height: int | None = 300,
    empty: str = NONE_YET,
) -> str | None:
    """Open ones first, then the newest; returns the id that was picked last."""
    ordered = sorted(incidents, key=lambda one: (not one.is_open, -one.begin))
    rows = [_row(one, costs.get(one.id), until) for one in ordered]
    return picking_table(
        LIST_COLUMNS,
        rows,
        key,
        label="Incidents",
        empty=empty,
        selected=selected,
        max_height=max_height,
    )


def timeline(incident: Incident, until: float, key: str) -> None:
    mount("timeline", timeline_data(incident, until), key)


def timeline_data(incident: Incident, until: float) -> dict[str, Any]:
    """Data of the timeline component."""
    end = until if incident.end is None else incident.end
    length = max(end - incident.begin, 1e-9)
    return {
        "label": "Parts of the incident, in order, to scale",
        "begin": incident.begin,
        "end": incident.end,
        "stretches": [
            {
                "word": PART_LOOKS[one.part].word,
                "colour": PART_LOOKS[one.part].colour,
                "ink": ink(PART_LOOKS[one.part].colour),
                "text": seconds(one.end - one.begin),
                "share": round((one.end - one.begin) / length, 5),
            }
            for one in incident.stretches
        ],
        "moments": [
            {
                "at": one.at,
                "kind": one.kind,
                "text": one.text,
                "look": (MOMENT_LOOKS.get(one.kind) or SEVERITY_LOOKS[one.severity]).data(),
            }
            for one in incident.moments
        ],
    }


def part_table(cost: Cost, key: str) -> None:
    """What each part cost."""
    rows = []
    for one in cost.parts:
        look = PART_LOOKS[one.part]
        share = one.gpu_hours / cost.gpu_hours if cost.gpu_hours > 0 else 0.0
        face = Look(mark=" ", colour=look.colour, word=look.word)
        cells = (
            marked(face),
            seconds(one.wall_s),
            gpu_hours(one.gpu_hours),
            percent(share),
            look.means,
        )
        rows.append(Row(id=one.part, cells=cells))
    total = ("all of it", seconds(sum(one.wall_s for one in cost.parts)), gpu_hours(cost.gpu_hours))
    rows.append(Row(id="total", cells=(*total, "", ""), strong=True))
    table(PART_COLUMNS, rows, key, label="What each part cost", empty="")


def alternative_table(cost: Cost, key: str) -> None:
    """What the alternatives would have cost."""
    rows = [
        Row(
            id="done",
            strong=True,
            cells=("What was done", "", gpu_hours(cost.gpu_hours), "", "measured"),
        )
    ]
    for index, one in enumerate(cost.alternatives):
        difference = one.gpu_hours - cost.gpu_hours
        sign = "+" if difference >= 0 else "−"
        cells = (
            one.title,
            percent(one.goodput) if one.goodput is not None else DASH,
            gpu_hours(one.gpu_hours),
            f"{sign}{gpu_hours(abs(difference))}",
            one.basis,
        )
        rows.append(Row(id=str(index), cells=cells))
    table(ALTERNATIVE_COLUMNS, rows, key, label="Alternatives and their cost", empty="")


def _row(incident: Incident, cost: Cost | None, until: float) -> Row:
    end = until if incident.end is None else incident.end
    waited = (
        next((one.wall_s for one in cost.parts if one.part == "waited"), None) if cost else None
    )
    state = marked(OPEN, "open") if incident.is_open else marked(WELL, "recovered, verified")
    return Row(
        id=incident.id,
        cells=(
            {"time": incident.begin},
            {"text": incident.title, "sub": f"replica {incident.replica}"},
            state,
            seconds(end - incident.begin),
            gpu_hours(cost.gpu_hours) if cost else DASH,
            seconds(waited),
        ),
        strong=incident.is_open,
    )
