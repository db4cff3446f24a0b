"""Tables that more than one page shows: events and proposals."""

from __future__ import annotations

from collections.abc import Iterable

from app.components.parts import Column, Row, marked, table
from app.palette import PROPOSAL_LOOKS, SEVERITY_LOOKS
from app.words import percent, split_title
from storage.records import EventHappened, Option, Proposal

EVENT_COLUMNS = (
    Column(label="When", kind="right"),
    Column(label="Event", kind="wide"),
    Column(label="Where"),
    Column(label="Generation", kind="right"),
)
PROPOSAL_COLUMNS = (
    Column(label="Proposed", kind="right"),
    Column(label="Proposal", kind="wide"),
    Column(label="State", kind="wide"),
    Column(label="Decided by"),
    Column(label="Decided", kind="right"),
    Column(label="Predicted", kind="right", title="token goodput of the option"),
    Column(label="Actual", kind="right", title="token goodput measured afterwards"),
)


NO_EVENTS = "Nothing has happened yet. Failures, repairs and reconfigurations are listed here."


def event_table(
    events: Iterable[EventHappened],
    key: str,
    max_height: int | None = 300,
    empty: str = NO_EVENTS,
) -> None:
    """Events, newest first. `events`: oldest first."""
    rows = [
        Row(
            id=str(event.seq),
            cells=(
                {"time": event.at},
                marked(SEVERITY_LOOKS[event.severity], event.message, event.kind),
                where(event),
                str(event.generation),
            ),
        )
        for event in reversed(list(events))
    ]
    table(
        EVENT_COLUMNS,
        rows,
        key,
        label="Events",
        empty=empty,
        max_height=max_height,
    )


def proposal_table(proposals: Iterable[Proposal], key: str, empty: str) -> None:
    """Proposals in the order given, with what was decided by whom and what came of it."""
    rows = []
    for one in proposals:
        option = one.options[one.recommended if one.chosen is None else one.chosen]
        state = PROPOSAL_LOOKS[one.state]
        reason = f": {one.state_reason}" if one.state_reason else ""
        rows.append(
            Row(
                id=one.id,
                cells=(
                    {"time": one.created_at},
                    _proposed(one, option),
                    marked(state, state.word + reason),
                    one.decided_by,
                    "" if one.decided_at is None else {"time": one.decided_at},
                    percent(option.goodput),
                    percent(one.outcome.goodput) if one.outcome else "",
                ),
            )
        )
    table(PROPOSAL_COLUMNS, rows, key, label="Proposals", empty=empty, max_height=400)


def _proposed(proposal: Proposal, option: Option) -> dict[str, str]:
    short, detail = split_title(option.title)
    pin = f"replica {proposal.replica}, generation {proposal.generation}"
    return {"text": short, "sub": f"{pin}; {detail}" if detail else pin}


def where(event: EventHappened) -> str:
    """The GPU, else the rack, else the replica an event is about."""
    if place := event.gpu or event.rack:
        return place
    return "run" if event.replica is None else f"replica {event.replica}"
