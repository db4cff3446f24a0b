"""History: every recorded run; one of them in full. Reads SQL alone: works with Redis away."""

from __future__ import annotations

import json

import streamlit as st

from app import context
from app.components.parts import (
    Column,
    Row,
    Tile,
    heading,
    marked,
    picking_table,
    ribbon,
    table,
    tiles,
)
from app.components.registry import mount
from app.lookback import PastRun
from app.palette import NEUTRAL, STATUS_LOOKS, Look
from app.past_figures import past_loss, shape_over_time
from app.tables import event_table, proposal_table
from app.words import DASH, device_words, number, params, percent, plural, seconds
from storage.history.queries import RunSummary
from storage.records import DecisionMade

REFRESH_S = 10.0
SILENT = Look(mark="?", colour=NEUTRAL, word="silent: no end recorded", hatch=True)
NOTHING = (
    "No run is recorded yet. The recorder writes a run here within seconds of its start: "
    "`./run up` starts one."
)
RUN_COLUMNS = (
    Column(label="Started", kind="right"),
    Column(label="Run"),
    Column(label="Status"),
    Column(label="Steps", kind="right"),
    Column(label="Loss", kind="right"),
    Column(label="Time goodput", kind="right"),
    Column(label="Token goodput", kind="right"),
    Column(label="Wall time", kind="right"),
    Column(label="Device"),
)


def render() -> None:
    search = st.text_input(
        "Search runs", placeholder="Search by name or id", label_visibility="collapsed"
    )
    found = context.lookback().runs(search.strip())
    if found.trouble:
        st.markdown(f"**History is not available.** {found.trouble}")
        st.markdown("Live pages work without it; nothing is lost, the recorder catches up.")
        return
    selected = st.query_params.get("run") or st.session_state.get("history_run")
    rows = [_run_row(one) for one in found.runs]
    nothing = f"No recorded run matches “{search}”." if search else NOTHING
    picked = picking_table(
        RUN_COLUMNS,
        rows,
        "history_runs",
        label="Recorded runs",
        empty=nothing,
        selected=selected,
        max_height=260,
    )
    if picked and picked != st.session_state.get("history_run"):
        st.session_state["history_run"] = picked
        st.query_params["run"] = picked
        st.rerun()
    if selected is None:
        if rows:
            st.caption("Pick a run to see its loss, shape, decisions and where its time went.")
        return
    living = any(one.run == selected and one.ended_at is None for one in found.runs)
    st.fragment(_detail, run_every=REFRESH_S if living else None)(selected)


def _detail(run: str) -> None:
    past = context.lookback().run(run)
    if past is None:
        st.markdown(f"The history does not know the run {run}, or cannot be read now.")
        return
    summary = past.detail
    heading(f"{summary.name} ({summary.run})")
    _facts(past)
    tiles(_numbers(summary), "history_numbers")
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
        else:
            st.caption("No step is recorded yet.")
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


def _numbers(summary: RunSummary) -> list[Tile]:
    return [
        Tile(label="Steps", value=number(summary.steps), sub=_status(summary).word),
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
    ]


def _run_row(run: RunSummary) -> Row:
    return Row(
        id=run.run,
        cells=(
            {"time": run.started_at},
            f"{run.name} ({run.run})",
            marked(_status(run), title=run.status_reason),
            number(run.steps),
            number(run.last_loss, 4),
            percent(run.time_goodput),
            percent(run.token_goodput),
            seconds(run.wall_s),
            device_words(run.device, run.emulated),
        ),
    )


def _status(run: RunSummary) -> Look:
    for status, look in STATUS_LOOKS.items():
        if status == run.status:
            return look
    return SILENT


def _decisions(past: PastRun) -> None:
    columns = [Column(label="When", kind="right"), Column(label="Verdict"), Column(label="Option")]
    columns += [Column(label="Who"), Column(label="Via"), Column(label="Reason", kind="wide")]
    columns += [Column(label="Generation", kind="right")]
    titles = {one.id: [option.title for option in one.options] for one in past.proposals}
    rows = [
        Row(
            id=one.id,
            cells=(
                {"time": one.at},
                one.verdict,
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
