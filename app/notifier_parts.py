"""Who is told of proposals, decisions and incidents, and whether that works."""

from __future__ import annotations

import time

from app import context
from app.components.parts import Column, Row, heading, marked, table
from app.palette import SEVERITY_LOOKS, WELL
from app.words import DASH, plural, seconds
from storage.notifier_state import ChannelState, NotifierState

SILENT_S = 60.0
COLUMNS = (
    Column(label="Channel"),
    Column(label="State"),
    Column(label="Waiting", kind="right", title="notices that are not delivered yet"),
    Column(label="Delivered", kind="right"),
    Column(label="Refused", kind="right", title="the endpoint would not take them"),
    Column(label="Dropped", kind="right", title="a day old, or more than a thousand waited"),
    Column(label="Last delivered", kind="right"),
    Column(label="What it said", kind="wide"),
)
NOBODY = (
    "Nobody is told: no notifier has run. Set COUNTERPOISE_NOTIFY_SLACK, "
    "COUNTERPOISE_NOTIFY_WEBHOOKS or COUNTERPOISE_NOTIFY_SMTP before `counterpoise up` or "
    "`counterpoise notifier`, and try them by `counterpoise notify test`."
)


def who_is_told() -> None:
    """A table of the ways out, from what the notifier said last."""
    heading("Who is told")
    state = context.reader().notifier()
    rows = [] if state is None else channel_rows(state, time.time())
    table(COLUMNS, rows, "who_is_told", label="Who is told", empty=NOBODY)


def channel_rows(state: NotifierState, now: float) -> list[Row]:
    """One row a channel; a notifier that fell silent, and what it missed, are rows too."""
    rows = [_row(one, now) for one in state.channels]
    if now - state.at > SILENT_S:
        said = f"no word from {state.host} for {seconds(now - state.at)}: is it running?"
        rows.insert(0, _remark("silent", "not running", said))
    if state.missed:
        said = f"{plural(state.missed, 'entry', 'entries')} were gone before it could read them"
        rows.append(_remark("missed", "missed some", said))
    return rows


def _row(channel: ChannelState, now: float) -> Row:
    if channel.failing_since is not None:
        look, word = (
            SEVERITY_LOOKS["critical"],
            f"failing for {seconds(now - channel.failing_since)}",
        )
    elif channel.delivered_at is None:
        look, word = SEVERITY_LOOKS["info"], "not used yet"
    else:
        look, word = WELL, "works"
    counts = (channel.pending, channel.delivered, channel.refused, channel.dropped)
    last = DASH if channel.delivered_at is None else {"time": channel.delivered_at}
    return Row(
        id=channel.name,
        cells=(channel.name, marked(look, word), *map(str, counts), last, channel.error),
    )


def _remark(name: str, word: str, said: str) -> Row:
    state = marked(SEVERITY_LOOKS["warning"], word)
    return Row(id=name, cells=("notifier", state, *[DASH] * 5, said))
