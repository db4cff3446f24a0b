"""Reconfigure: decide open proposals, ask for one by hand, see what came of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app import context, dialogs, header
from app.commands import explain, mint
from app.components.parts import Column, Row, copy_link, heading, table
from app.policy_panel import policy_panel
from app.proposal_card import card_body, card_head
from app.queries import LiveSnapshot
from app.rights import why_not_approve, why_not_decide
from app.run_controls import run_controls
from app.tables import proposal_table
from app.words import ACTION_WORDS
from storage.commands import Trigger
from storage.records import ActionKind, Proposal, RunState

# What a person may ask for; the planner answers with a proposal or says why not
TRIGGERS: tuple[ActionKind, ...] = (
    "shrink", "shrink_boost", "grow", "replace", "drop", "restart",
)  # fmt: skip
RECENT_S = 120.0


def render() -> None:
    st.fragment(_proposals, run_every=context.tick_s())()
    state = context.snapshot().state
    if state is not None and state.status not in context.ENDED:
        _trigger(state)
    st.fragment(_controls, run_every=context.tick_s())()
    st.fragment(_closed, run_every=context.tick_s() + 1.0)()


def _proposals() -> None:
    snapshot = context.snapshot()
    if snapshot.state is None:
        header.nothing_runs(snapshot.down)
        return
    shown = _shown(snapshot)
    asked = st.query_params.get("proposal")
    if asked and all(one.id != asked for one in shown):
        st.markdown(f"This run has no proposal {asked} among its newest ones; History keeps all.")
    if snapshot.state.status == "paused":
        st.markdown(
            f"**The run is {snapshot.state.status_reason}.** Nothing trains and nothing is "
            "proposed until it is resumed, below."
        )
    elif not any(one.state == "open" for one in shown):
        st.markdown(
            "Nothing waits for a decision. A proposal appears here when a GPU fails, slows down "
            "or comes back; you can also ask for one below."
        )
    for proposal in shown:
        with st.container(border=True):
            head, link = st.columns([6, 1])
            with head:
                card_head(proposal, proposal.id)
            with link:
                copy_link(f"link_{proposal.id}", run=proposal.run, proposal=proposal.id)
            card_body(proposal, snapshot.state.global_batch, proposal.id)
            if proposal.state == "open":
                _decide(proposal)
            elif _can_be_undone(proposal, snapshot.proposals):
                _undo(proposal)
    _requests(snapshot)


def _shown(snapshot: LiveSnapshot) -> list[Proposal]:
    """The one the address names first, then the open ones, then what was closed a moment ago."""
    now = snapshot.updated_at
    asked = st.query_params.get("proposal")
    recent = [
        one
        for one in snapshot.proposals
        if not one.is_final or one.id == asked or now - _closed_at(one) < RECENT_S
    ]
    order = {"open": 0, "applying": 1, "approved": 1}
    return sorted(recent, key=lambda one: (one.id != asked, order.get(one.state, 2)))[:8]


def _closed_at(proposal: Proposal) -> float:
    applied = proposal.outcome.applied_at if proposal.outcome else 0.0
    return max(applied, proposal.decided_at or 0.0, min(proposal.created_at, proposal.expires_at))


def _decide(proposal: Proposal) -> None:
    author = context.author()
    lacks, bars = why_not_decide(proposal, author), why_not_approve(proposal, author)
    approve, reject, why = st.columns([1, 1, 3], vertical_alignment="center")
    if approve.button(
        "Approve…",
        key=f"approve_{proposal.id}",
        type="primary",
        width="stretch",
        disabled=bool(bars),
    ):
        dialogs.open_approve(proposal)
    if reject.button("Reject…", key=f"reject_{proposal.id}", width="stretch", disabled=bool(lacks)):
        dialogs.open_reject(proposal)
    if bars:
        why.caption(bars)


def _can_be_undone(proposal: Proposal, known: Sequence[Proposal]) -> bool:
    """Whether it is the last that was applied to its replica, and nothing waits there."""
    own = [one for one in known if one.replica == proposal.replica]
    applied = max(
        (one for one in own if one.state == "applied"),
        key=lambda one: one.decided_at or 0.0,
        default=None,
    )
    return applied is proposal and all(one.is_final for one in own)


def _undo(proposal: Proposal) -> None:
    lacks = context.lacks(Trigger)
    button, why = st.columns([1, 4], vertical_alignment="center")
    if button.button("Undo…", key=f"undo_{proposal.id}", width="stretch", disabled=bool(lacks)):
        dialogs.open_undo(proposal)
    if lacks:
        why.caption(lacks)


def _requests(snapshot: LiveSnapshot) -> None:
    """What this session asked for and what the runtime made of it."""
    sent = [one for one in st.session_state.get("sent", []) if one[0] == context.selected_run()]
    if not sent:
        return
    rows = []
    for run, command, what, first in reversed(sent):
        answer = context.reader().result(run, command)
        text = explain(answer or first)
        rows.append(Row(id=command, cells=({"time": first.at}, what, text)))
    heading("Your requests")
    table(
        [
            Column(label="Sent", kind="right"),
            Column(label="Request"),
            Column(label="Answer", kind="wide"),
        ],
        rows,
        "requests",
        label="Your requests",
        empty="",
    )


def _trigger(state: RunState) -> None:
    heading("Ask for a proposal")
    replica, action, reason, send = st.columns([1, 1, 2, 1], vertical_alignment="bottom")
    replica.selectbox("Replica", [one.replica for one in state.replicas], key="trigger_replica")
    action.selectbox(
        "Action", TRIGGERS, format_func=lambda one: ACTION_WORDS[one], key="trigger_kind"
    )
    reason.text_input("Reason (optional)", key="trigger_reason", max_chars=200)
    command = st.session_state.setdefault("trigger_command", mint())

    def submit() -> None:
        # Of the state: what was typed last may come with the click itself.
        chosen, kind, why = (
            st.session_state[f"trigger_{name}"] for name in ("replica", "kind", "reason")
        )
        result = context.commands().trigger(command, state.run, chosen, kind, why.strip())
        what = f"propose {ACTION_WORDS[kind]}, replica {chosen}"
        dialogs.remember(state.run, command, what, result)
        if result.ok:
            st.session_state["trigger_command"] = mint()
        context.reader().refresh(state.run)

    lacks = context.lacks(Trigger)
    send.button("Ask", key="trigger_send", on_click=submit, width="stretch", disabled=bool(lacks))
    st.caption(
        f"The planner predicts its effect first; it is carried out only once approved. {lacks}"
    )


def _controls() -> None:
    state = context.snapshot().state
    if state is not None and state.status not in context.ENDED:
        policy_panel(state)
        run_controls(state)


def _closed() -> None:
    snapshot = context.snapshot()
    if snapshot.state is None:
        return
    heading("Closed proposals")
    proposal_table(
        [one for one in snapshot.proposals if one.is_final],
        "closed_proposals",
        "None yet. Decided, expired and stale proposals stay listed here.",
    )
