"""What the Power page shows, as plain values: a row per rack, totals, the chart, the cap journal.

Pure: records in, numbers and payloads out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.figures import encoded
from app.palette import BOOSTED, FAILED, HEALTHY, NEUTRAL
from app.words import DASH, plural
from storage.records import EventHappened, RackRecord, ReplicaState

CAP_KINDS = frozenset({"cap_changed", "budget_changed", "batch_reshared"})


@dataclass(frozen=True, kw_only=True)
class RackWatts:
    """One rack's watts now. boost_w: of its most boosted GPU. headroom: failures that power could
    still make up for, None when not known. hottest_c: None when no temperature is known."""

    rack: str
    budget_w: float
    caps_w: float
    drawn_w: float
    num_boosted: int
    boost_w: float
    headroom: int | None
    hottest_c: float | None
    backend: str
    notice: str

    @property
    def free_w(self) -> float:
        return self.budget_w - self.caps_w


def rack_watts(record: RackRecord, replicas: Sequence[ReplicaState]) -> RackWatts:
    """The row of one rack; its headroom is that of the replica it carries."""
    caps, temps = record.column("cap_w"), record.column("temp_c")
    over = np.nan_to_num(caps - np.float32(record.normal_cap_w))
    known = [one.boostable_failures for one in replicas if one.rack == record.rack]
    known = [one for one in known if one >= 0]
    finite = temps[np.isfinite(temps)]
    return RackWatts(
        rack=record.rack,
        budget_w=record.budget_w,
        caps_w=float(np.nansum(caps)),
        drawn_w=float(np.nansum(record.column("power_w"))),
        num_boosted=int((over > 0.5).sum()),
        boost_w=max(0.0, float(over.max(initial=0.0))),
        headroom=min(known) if known else None,
        hottest_c=float(finite.max()) if len(finite) else None,
        backend=record.backend,
        notice=record.notice,
    )


def headroom_words(failures: int | None) -> str:
    """`2 more failures`; what power could still make up for."""
    return DASH if failures is None else f"{plural(failures, 'more failure')}"


def cap_journal(events: Iterable[EventHappened]) -> list[EventHappened]:
    """The events about caps and budgets, in the order given."""
    return [event for event in events if event.kind in CAP_KINDS]


def watts_chart(records: Sequence[RackRecord], height: int) -> dict[str, Any]:
    """Budget, caps and draw of one rack over its last minutes. `records`: oldest first."""
    at = np.array([record.at for record in records])
    x = encoded(at - at[-1] if len(at) else at)
    lines = (
        ("budget", [one.budget_w for one in records], FAILED, "dash"),
        ("sum of caps", [np.nansum(one.column("cap_w")) for one in records], BOOSTED, "solid"),
        ("draw", [np.nansum(one.column("power_w")) for one in records], HEALTHY, "solid"),
        ("normal caps", [one.normal_cap_w * one.num_gpus for one in records], NEUTRAL, "dot"),
    )
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": x,
            "y": encoded(np.array(values, dtype=np.float64)),
            "name": name,
            "line": {"width": 1.6, "color": colour, "dash": dash, "shape": "hv"},
            "hovertemplate": f"%{{y:,.0f}} W<extra>{name}</extra>",
        }
        for name, values, colour, dash in lines
    ]
    return {
        "traces": traces,
        "layout": {
            "xaxis": {"title": {"text": "seconds before now"}},
            "yaxis": {"title": {"text": "W"}, "rangemode": "tozero"},
            "showlegend": True,
            "legend": {"orientation": "h", "y": 1.12, "x": 0},
        },
        "height": height,
        "toolbar": False,
        "label": "Budget, caps and draw of the rack over the last minutes",
    }
