"""Pause, resume and stop: buttons for the whole run, each with a confirmation."""

from __future__ import annotations

from typing import NamedTuple

import streamlit as st

from app import context
from app.commands import mint
from app.components.parts import heading
from app.dialogs import buttons
from storage.commands import CommandResult, Pause, Resume, Stop
from storage.records import RunState

Kind = type[Pause | Resume | Stop]


class _Words(NamedTuple):
    """label: of the button. effect: what confirming it does."""

    label: str
    effect: str


WORDS: dict[Kind, _Words] = {
    Pause: _Words(
        "Pause",
        "The run stands still from the next step boundary on. Its processes live on and keep "
        "their state, so no step is lost; the time counts as paused. Open proposals lapse.",
    ),
    Resume: _Words(
        "Resume",
        "The run goes on with the next step, with every GPU it had that is still there.",
    ),
    Stop: _Words(
        "Stop",
        "The run ends at the next step boundary and writes a checkpoint; all its processes end. "
        "The next start goes on from there.",
    ),
}


def run_controls(state: RunState) -> None:
    """Buttons for what can be asked of the run as it stands."""
    heading("The whole run")
    first: Kind = Resume if state.status == "paused" else Pause
    columns = st.columns([1, 1, 3], vertical_alignment="center")
    lacks = []
    for column, kind in zip(columns, (first, Stop), strict=False):
        label = WORDS[kind].label
        lacks.append(context.lacks(kind))
        if column.button(
            f"{label}…", key=f"run_{label.lower()}", width="stretch", disabled=bool(lacks[-1])
        ):
            _confirm(state.run, state.name, kind, mint())
    if any(lacks):
        columns[2].caption(next(filter(None, lacks)))


def _confirm(run: str, name: str, kind: Kind, command: str) -> None:
    label, effect = WORDS[kind]

    @st.dialog(f"{label} the run")
    def dialog() -> None:
        st.markdown(effect)
        typed = f"reason_{command}"
        st.text_input("Reason (optional, kept with the run)", key=typed, max_chars=200)

        def send() -> CommandResult:
            # Of the state: what was typed last may come with the click itself.
            reason = str(st.session_state.get(typed, "")).strip()
            return context.commands().ask(command, run, kind, reason)

        ends = name if kind is Stop else ""
        buttons(label, command, run, f"{label.lower()} the run", send, name=ends)

    dialog()
