"""A run as one HTML file that a person can send: pictures inside, nothing from the network, UTC.

Pure: records in, text out. Everything that came from people or programs is escaped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

import numpy as np

from app.line import on_the_line
from app.lookback import PastIncidents, PastRun
from app.palette import BOOSTED, BUCKET_LOOKS, HEALTHY, PART_LOOKS
from app.svg import Line, bar, line_chart
from app.words import DASH, device_words, gpu_hours, number, params, percent, seconds, split_title
from storage.history.incidents import Incident
from storage.records import BUCKETS

MAX_EVENTS = 200
CSS = """
:root { color-scheme: light dark; --text: #1b1f24; --back: #fff; --line: #d5d9de; --soft: #5b6470; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7eb; --back: #14171b; --line: #363c45;
  --soft: #98a2ae; } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 860px; margin: 24px auto; padding: 0 16px; font-variant-numeric: tabular-nums; }
h1 { font-size: 22px; margin-bottom: 2px; } h2 { font-size: 17px; margin: 28px 0 8px; }
table { border-collapse: collapse; width: 100%; } .soft { color: var(--soft); }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 12px; }
td, th { border-bottom: 1px solid var(--line); padding: 3px 12px 3px 0; vertical-align: top; }
.r { text-align: right; white-space: nowrap; } svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; fill: var(--soft); } .mid { text-anchor: middle; }
.end { text-anchor: end; } .grid { stroke: var(--line); } .mark { stroke: var(--soft); }
.swatch { display: inline-block; width: 10px; height: 10px; margin-right: 6px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px; }
"""


def report(past: PastRun, incidents: PastIncidents | None, made_at: float, who: str) -> str:
    """The whole file."""
    detail = past.detail
    title = escape(f"{detail.name} ({detail.run})")
    body = [
        f"<h1>{title}</h1>",
        f'<p class="soft">{_facts(past)}<br>Report made {utc(made_at)} by {escape(who)}. '
        "All times are UTC.</p>",
        _numbers(past),
        "<h2>Where the time went</h2>",
        _ledger(past),
        "<h2>Loss and throughput</h2>",
        _charts(past),
        "<h2>Generations</h2>",
        _generations(past),
        "<h2>Incidents</h2>",
        _incidents(incidents),
        "<h2>Proposals and decisions</h2>",
        _decisions(past),
        "<h2>Notes</h2>",
        _table(
            ("When", "Who", "Note"),
            [(utc(one.at), one.who, one.text) for one in past.notes],
            "None.",
        ),
        "<h2>Events</h2>",
        _table(
            ("When", "Event", "Generation"),
            [(utc(e.at), e.message, str(e.generation)) for e in past.events[-MAX_EVENTS:]],
            "None.",
        ),
        f"<h2>Configuration</h2><pre>{escape(detail.config)}</pre>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{CSS}</style></head>'
        f"<body>{''.join(body)}</body></html>"
    )


def utc(at: float | None) -> str:
    return DASH if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))


def _facts(past: PastRun) -> str:
    one = past.detail
    parts = [
        device_words(one.device, one.emulated),
        f"{past.num_gpus} GPUs",
        params(one.num_params),
        f"{one.global_batch} samples of {one.seq_len} tokens a step",
        f"{utc(one.started_at)} to {utc(one.ended_at) if one.ended_at else 'now'}",
        one.status + (f": {one.status_reason}" if one.status_reason else ""),
    ]
    if one.tags:
        parts.append("tags: " + ", ".join(one.tags))
    return escape(" · ".join(parts))


def _numbers(past: PastRun) -> str:
    one = past.detail
    rows = [
        ("Steps", number(one.steps)),
        ("Loss of the last step", number(one.last_loss, 4)),
        ("Tokens committed", number(one.tokens)),
        ("Wall time", seconds(one.wall_s)),
        ("GPU-hours", gpu_hours(one.wall_s * past.num_gpus / 3600)),
        ("Time goodput", percent(one.time_goodput)),
        ("Token goodput", percent(one.token_goodput)),
    ]
    if past.against is not None:
        dropped = percent(past.against.dropped)
        rows.append(("Goodput had replicas been dropped", f"{dropped} ({past.against.basis})"))
    return _table(("Figure", "Value"), rows, "")


def _ledger(past: PastRun) -> str:
    spent = {bucket: past.detail.ledger.get(bucket, 0.0) for bucket in BUCKETS}
    total = sum(spent.values())
    if total <= 0:
        return "<p>No time is recorded.</p>"
    shown = [bucket for bucket in BUCKETS if spent[bucket] > 0]
    looks = {bucket: BUCKET_LOOKS[bucket] for bucket in shown}
    parts = [(looks[one].word, looks[one].colour, spent[one] / total) for one in shown]
    rows = "".join(
        f'<tr><td><span class="swatch" style="background:{looks[one].colour}"></span>'
        f'{looks[one].word}</td><td class="r">{seconds(spent[one])}</td>'
        f'<td class="r">{percent(spent[one] / total)}</td><td>{escape(looks[one].means)}</td></tr>'
        for one in shown
    )
    return bar(parts, "Goodput ledger") + f"<table>{rows}</table>"


def _charts(past: PastRun) -> str:
    steps = past.steps
    if not len(steps):
        return "<p>No step is recorded.</p>"
    x, marks = (
        steps.step.astype(np.float64),
        [float(one.first_step) for one in on_the_line(past.generations)],
    )
    loss = Line(name="loss", colour=BOOSTED, x=x, y=steps.loss)
    pace = Line(name="tokens/s", colour=HEALTHY, x=x, y=steps.tokens_per_s)
    note = f'<p class="soft">Each point is the mean of {seconds(steps.span_s)}.</p>'
    return (
        line_chart([loss], "step", "loss", marks)
        + line_chart([pace], "step", "tokens/s", marks)
        + (note if steps.span_s else "")
    )


def _generations(past: PastRun) -> str:
    rows = [
        (
            utc(form.at),
            str(form.generation),
            number(form.first_step),
            ", ".join(
                f"{len(one.live)}/{len(one.gpus)}" if one.mode == "training" else "left out"
                for one in form.replicas[:32]
            ),
            form.cause,
        )
        for form in past.generations[-MAX_EVENTS:]
    ]
    return _table(("Formed", "Generation", "First step", "Slots", "Cause"), rows, "None.")


def _incidents(past: PastIncidents | None) -> str:
    if past is None or not past.incidents:
        return "<p>None.</p>"
    return "".join(_incident(one, past) for one in past.incidents[-50:])


def _incident(one: Incident, past: PastIncidents) -> str:
    end = past.until if one.end is None else one.end
    cost = past.costs.get(one.id)
    length = max(end - one.begin, 1e-9)
    parts = [
        (PART_LOOKS[s.part].word, PART_LOOKS[s.part].colour, (s.end - s.begin) / length)
        for s in one.stretches
    ]
    state = f"recovered, verified: {one.verified}" if one.end else "not recovered"
    text = (
        f"<p><b>{escape(one.title)}</b>, replica {one.replica}, {utc(one.begin)}, "
        f"{seconds(end - one.begin)}, {escape(state)}</p>{bar(parts, 'Parts of the incident')}"
    )
    if cost is None:
        return text
    rows = [
        (
            PART_LOOKS[p.part].word,
            seconds(p.wall_s),
            gpu_hours(p.gpu_hours),
            PART_LOOKS[p.part].means,
        )
        for p in cost.parts
    ]
    rows.append(("all of it", seconds(length), gpu_hours(cost.gpu_hours), ""))
    rows += [
        (f"alternative: {a.title}", "", gpu_hours(a.gpu_hours), a.basis) for a in cost.alternatives
    ]
    return text + _table(("Part", "Time", "Cost", "What it is"), rows, "")


def _decisions(past: PastRun) -> str:
    titles = {one.id: one for one in past.proposals}
    rows = []
    for one in past.decisions:
        proposal = titles.get(one.proposal)
        index = one.option if one.option is not None else (proposal.recommended if proposal else 0)
        option = proposal.options[index] if proposal and index < len(proposal.options) else None
        actual = proposal.outcome.goodput if proposal and proposal.outcome else None
        rows.append(
            (
                utc(one.at),
                one.verdict.replace("_", " "),
                split_title(option.title)[0] if option else one.proposal,
                f"{one.who} ({one.via})",
                one.reason or DASH,
                percent(option.goodput) if option else DASH,
                percent(actual),
            )
        )
    columns = ("When", "Verdict", "Option", "Who", "Reason", "Predicted goodput", "Actual")
    return _table(columns, rows, "None.")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> str:
    if not rows:
        return f"<p>{escape(empty)}</p>"
    head = "".join(f"<th>{escape(one)}</th>" for one in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
