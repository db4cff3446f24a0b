"""Overview: is training healthy, what is lost, what waits for me."""

from __future__ import annotations

import streamlit as st

from app import context, header
from app.components.parts import Tile, heading, ribbon, ribbon_now, tiles
from app.components.registry import mount
from app.figures import loss_and_pace
from app.incident_parts import incident_list
from app.live_shape import live_shape
from app.proposal_card import card_line
from app.queries import LiveSnapshot
from app.tables import event_table
from app.verdict import answers, goodput_now
from app.words import number, percent
from storage.records import RunState

NUM_EVENTS = 30
NUM_INCIDENTS = 5


def render() -> None:
    st.fragment(_live, run_every=context.tick_s())()


def _live() -> None:
    snapshot = context.snapshot()
    state = snapshot.state
    if state is None:
        header.nothing_runs(snapshot.down)
        return
    # Containers keep every part at its place in the page while proposals come and go
    verdict, waiting, numbers = st.container(), st.container(), st.container()
    left, charts = st.columns([2, 3], gap="medium")
    shape, goodput, below = left.container(), left.container(), st.container()
    with verdict:
        mount("verdict", {"parts": answers(snapshot, state)}, "overview_verdict")
    with waiting:
        _waiting(snapshot, state)
    with numbers:
        tiles(_numbers(state), "overview_numbers")
    with shape:
        heading("Shape")
        live_shape(snapshot, state, "overview_shape")
    with charts:
        heading("Loss and throughput")
        _charts(snapshot, state)
    with goodput:
        heading("Where the time went")
        if snapshot.recent.ledger:
            st.caption("The last 5 minutes, then the whole run.")
            ribbon_now(snapshot.recent.ledger, "overview_now")
        ribbon(state.ledger, state.wall_s, "overview_ribbon")
    with below:
        _incidents(snapshot, state)
        heading("Events")
        event_table(snapshot.events[-NUM_EVENTS:], "overview_events")


def _waiting(snapshot: LiveSnapshot, state: RunState) -> None:
    for proposal in snapshot.open_proposals:
        with st.container(border=True):
            line, button = st.columns([6, 1], vertical_alignment="center")
            with line:
                card_line(proposal, proposal.id)
            if proposal.state == "open" and button.button(
                "Look and decide",
                key=f"overview_decide_{proposal.id}",
                type="primary",
                width="stretch",
            ):
                context.open_page("reconfigure", run=state.run, proposal=proposal.id)


def _incidents(snapshot: LiveSnapshot, state: RunState) -> None:
    heading("Incidents")
    recent = snapshot.recent
    shown = sorted(recent.incidents, key=lambda one: (one.is_open, one.begin))[-NUM_INCIDENTS:]
    picked = incident_list(shown, recent.costs, snapshot.updated_at, "overview_incidents")
    if picked and picked != st.session_state.get("overview_incident"):
        st.session_state["overview_incident"] = picked
        context.open_page("incidents", run=state.run, incident=picked)


def _numbers(state: RunState) -> list[Tile]:
    ideal = state.ideal_step_s
    pace = f"healthy pace {number(ideal, 2)} s" if ideal > 0 else "healthy pace not measured yet"
    tokens = state.global_batch * state.seq_len
    return [
        Tile(
            label="Goodput now",
            value=percent(goodput_now(state)).removesuffix(" %"),
            unit="%",
            sub="of the healthy pace",
            title="Pace of the last steps over the pace of the fully healthy run",
        ),
        Tile(
            label="Token goodput",
            value=percent(state.token_goodput).removesuffix(" %"),
            unit="%",
            sub="of the healthy run's tokens",
            title="Committed tokens over what the fully healthy run would have committed",
        ),
        Tile(
            label="Time goodput",
            value=percent(state.time_goodput).removesuffix(" %"),
            unit="%",
            sub="of the run's wall time",
            title="Share of the wall time spent on committed steps",
        ),
        Tile(
            label="Throughput",
            value=number(state.tokens_per_s, 0),
            unit="tokens/s",
            sub=f"{number(tokens)} tokens a step",
        ),
        Tile(label="Step time", value=number(state.step_s, 2), unit="s", sub=pace),
        Tile(label="Loss", value=number(state.loss, 4), sub=f"step {number(state.step)}"),
    ]


def _charts(snapshot: LiveSnapshot, state: RunState) -> None:
    if not len(snapshot.steps.step):
        st.caption("The loss curve begins with the first committed step.")
        return
    tokens = state.global_batch * state.seq_len
    ideal = tokens / state.ideal_step_s if state.ideal_step_s > 0 else 0.0
    mount("chart", loss_and_pace(snapshot.steps, ideal, 420), "overview_chart")
