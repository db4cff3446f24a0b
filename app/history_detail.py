"""One recorded run in full: numbers, charts, incidents, decisions, events."""

from __future__ import annotations

import json

import streamlit as st

from app import context, keepsakes
from app.components.parts import Column, Row, Tile, heading, ribbon, table, tiles
from app.components.registry import mount
from app.incident_parts import incident_list
from app.lookback import PastRun
from app.palette import NEUTRAL, STATUS_LOOKS, Look
from app.past_figures import past_loss, shape_over_time
from app.tables import event_table, proposal_table
from app.words import DASH, device_words, number, params, percent, plural, seconds, split_title
from storage.history.queries import RunSummary
from storage.records import DecisionMade

SILENT = Look(mark="?", colour=NEUTRAL, word="silent: no end recorded", hatch=True)


def render(run: str) -> None:
    past = context.lookback().run(run)
    if past is None:
        st.markdown(f"The history does not know the run {run}, or cannot be read now.")
        return
    summary = past.detail
    heading(f"{summary.name} ({summary.run})")
    _facts(past)
    tiles(_numbers(past), "history_numbers")
    keepsakes.render(past)
    left, right = st.columns([2, 3], gap="medium")
    with left:
        heading("Where the time went")
        ribbon(summary.ledger, summary.wall_s, "history_ribbon")
        heading("Shape over time")
        if past.generations:
            mount("chart", shape_over_time(past), "history_shape")
        else:
            st.caption("No generation is recorded yet.")
    with right:
        heading("Loss and throughput")
        if len(past.steps):
            mount("chart", past_loss(past, 420), "history_loss")
            if past.steps.span_s:
                st.caption(f"Each point is the mean of {seconds(past.steps.span_s)}.")
        else:
            st.caption("No step is recorded yet.")
    heading("Incidents")
    _incidents(past)
    heading("Proposals")
    proposal_table(reversed(past.proposals), "history_proposals", "None was made in this run.")
    heading("Decisions")
    _decisions(past)
    heading("Events")
    event_table(past.events, "history_events", 400)
    with st.expander("Configuration"):
        st.code(_pretty(past.detail.config), language="json")


def _facts(past: PastRun) -> None:
    detail = summary = past.detail
    parts = [
        device_words(summary.device, summary.emulated),
        params(detail.num_params),
        f"{detail.global_batch} samples of {detail.seq_len} tokens a step",
        plural(summary.num_generations, "generation"),
    ]
    if summary.status_reason:
        parts.append(summary.status_reason)
    if summary.num_missing or summary.num_bad_records:
        parts.append(
            f"{summary.num_missing} journal entries missing, {summary.num_bad_records} unreadable"
        )
    st.caption(" · ".join(parts))


def _incidents(past: PastRun) -> None:
    found = context.lookback().incidents(past.detail.run)
    if found is None:
        st.caption("They cannot be read now.")
        return
    picked = incident_list(found.incidents, found.costs, found.until, "history_incidents")
    if picked and picked != st.session_state.get("history_incident"):
        st.session_state["history_incident"] = picked
        context.open_page("incidents", run=past.detail.run, incident=picked)


def status_of(run: RunSummary) -> Look:
    for status, look in STATUS_LOOKS.items():
        if status == run.status:
            return look
    return SILENT


def _against(past: PastRun) -> Tile:
    """What nonuniform tensor parallelism brought over dropping whole replicas."""
    label, against = "Against dropping replicas", past.against
    if against is None:
        return Tile(label=label, value=DASH, sub="no healthy pace was measured")
    points = 100 * (against.actual - against.dropped)
    return Tile(
        label=label,
        value=f"{points:+.1f}",
        unit="points",
        sub=f"{percent(against.actual)} instead of {percent(against.dropped)}",
        title=f"Token goodput while generations stood; {against.basis}",
    )


def _numbers(past: PastRun) -> list[Tile]:
    summary = past.detail
    return [
        Tile(label="Steps", value=number(summary.steps), sub=status_of(summary).word),
        Tile(label="Loss", value=number(summary.last_loss, 4), sub="of the last step"),
        Tile(label="Tokens", value=number(summary.tokens / 1e6, 1), unit="M", sub="committed"),
        Tile(
            label="Time goodput",
            value=percent(summary.time_goodput).removesuffix(" %"),
            unit="%",
            sub=f"wall time {seconds(summary.wall_s)}",
        ),
        Tile(
            label="Token goodput",
            value=percent(summary.token_goodput).removesuffix(" %"),
            unit="%",
            sub="of the healthy run's tokens",
        ),
        _against(past),
    ]


def _decisions(past: PastRun) -> None:
    columns = [Column(label="When", kind="right"), Column(label="Verdict"), Column(label="Option")]
    columns += [Column(label="Who"), Column(label="Via"), Column(label="Reason", kind="wide")]
    columns += [Column(label="Generation", kind="right")]
    titles = {
        one.id: [split_title(option.title)[0] for option in one.options] for one in past.proposals
    }
    rows = [
        Row(
            id=one.id,
            cells=(
                {"time": one.at},
                one.verdict.replace("_", " "),
                _option(one, titles.get(one.proposal, [])),
                one.who,
                one.via,
                one.reason or DASH,
                str(one.generation),
            ),
        )
        for one in reversed(past.decisions)
    ]
    table(columns, rows, "history_decisions", label="Decisions", empty="None was made in this run.")


def _option(decision: DecisionMade, titles: list[str]) -> str:
    if decision.option is not None and decision.option < len(titles):
        return titles[decision.option]
    return f"proposal {decision.proposal}"


def _pretty(config: str) -> str:
    try:
        return json.dumps(json.loads(config), indent=2)
    except ValueError:
        return config
