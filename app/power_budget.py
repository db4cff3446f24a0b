"""A rack's budget set from the Power page: a button, a confirmation, and what became of it."""

from __future__ import annotations

import streamlit as st

from app import context
from app.commands import explain, mint
from app.dialogs import buttons
from app.power_figures import RackWatts
from app.words import watts
from storage.commands import CommandResult, SetBudget
from storage.records import RunState

REQUEST = "budget of"


def budget_control(state: RunState, row: RackWatts) -> None:
    """The button for one rack, and the answer to what this session asked last."""
    lacks = context.lacks(SetBudget)
    if state.status in context.ENDED:
        lacks = "The run has ended."
    button, words = st.columns([1, 3], vertical_alignment="center")
    label = f"Set budget of {row.rack}…"
    if button.button(label, key="power_budget", width="stretch", disabled=bool(lacks)):
        _confirm(state.run, row, mint())
    with words:
        if lacks:
            st.caption(lacks)
        else:
            _last_answer(state.run)


def _confirm(run: str, row: RackWatts, command: str) -> None:
    @st.dialog(f"Budget of {row.rack}")
    def dialog() -> None:
        st.markdown(
            f"It stands at **{watts(row.budget_w)}**; its caps add up to {watts(row.caps_w)}, it "
            f"draws {watts(row.drawn_w)}."
        )
        chosen = st.number_input(
            "Watts (0: back to the configured budget)",
            min_value=0.0,
            value=float(round(row.budget_w)),
            step=100.0,
            format="%.0f",
            key=f"watts_{command}",
        )
        typed = f"reason_{command}"
        st.text_input("Reason (optional, kept with the change)", key=typed, max_chars=200)
        st.caption(
            "Caps above it are lowered within two seconds, boosts first; where that costs pace the "
            "batch is shared out anew. Less than the rack's GPUs need at their lowest cap is "
            f"refused. Recorded as {context.author().who}."
        )

        def send() -> CommandResult:
            # Of the state: what was typed last may come with the click itself.
            asked_w = float(st.session_state.get(f"watts_{command}", chosen))
            reason = str(st.session_state.get(typed, "")).strip()
            return context.commands().set_budget(command, run, row.rack, asked_w, reason)

        what = f"{REQUEST} {row.rack}: " + (watts(chosen) if chosen else "as configured")
        buttons("Set budget", command, run, what, send)

    dialog()


def _last_answer(run: str) -> None:
    """What the runtime made of the last budget that this session asked for."""
    sent = [one for one in st.session_state.get("sent", []) if one[0] == run]
    sent = [one for one in sent if one[2].startswith(REQUEST)]
    if not sent:
        return
    _, command, what, first = sent[-1]
    answer = context.reader().result(run, command) or first
    text = f"Your request, {what}: {explain(answer)}"
    if answer.ok:
        st.caption(text)
    else:
        st.error(text)
