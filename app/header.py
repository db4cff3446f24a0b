"""The header strip of every page: what runs, how it is, how old the numbers are, and who may act.

Also the page that stands where no run is: it says what would be there and how to get it.
"""

from __future__ import annotations

import time

import streamlit as st

from app import access, context
from app.components.registry import mount
from app.queries import LiveSnapshot
from app.shapes import status_look
from app.words import bare_device, number
from storage.records import RunState

COMMANDS = """\
./run up                               # a demonstration run and this dashboard
counterpoise train --config run.toml   # a run of your own
counterpoise --help                    # everything else
"""


def render() -> None:
    """The run selector (where there is a choice), the live strip, and the way out."""
    runs, _ = context.reader().runs()
    selected = context.selected_run()
    strip = st.fragment(_strip, run_every=context.tick_s())
    has_choice, has_way_out = len(runs) > 1, access.has_way_out()
    if not has_choice and not has_way_out:
        strip()
        return
    widths = [1.0] * has_choice + [4.0] + [0.6] * has_way_out
    columns = st.columns(widths, gap="small")
    if has_choice:
        with columns[0]:
            _selector(runs, selected)
    with columns[int(has_choice)]:
        strip()
    if has_way_out:
        with columns[-1]:
            access.sign_out_control(context.note_sign_out)


def nothing_runs(down: str) -> None:
    """Stands in for a live page when there is no run to show."""
    asked = st.query_params.get("run")
    if asked and not down:
        st.markdown(f"**Run {asked} is not live any more.** What was recorded of it is in History.")
        if st.button("Look back at this run"):
            context.open_page("history", run=asked)
        return
    if down:
        st.markdown(
            "**No live data.** Runs go on without it and nothing is lost; this page reconnects by "
            "itself. If nothing runs, start something:"
        )
    else:
        st.markdown("**No run is known here.** A run shows up within a second of its start:")
    st.code(COMMANDS, language="sh")
    st.markdown("Runs that have ended are in History.")


def _selector(runs: list[RunState], selected: str | None) -> None:
    # Without the status: a label that changes under the browser is taken for another choice.
    names = {run.run: f"{run.name} ({run.run})" for run in runs}
    if selected and selected not in names:
        names[selected] = selected
    order = list(names)
    st.selectbox(
        "Run",
        order,
        index=order.index(selected) if selected else 0,
        format_func=lambda run: names.get(run, run),
        key="header_run",
        on_change=lambda: context.select_run(st.session_state["header_run"]),
        label_visibility="collapsed",
    )


def _strip() -> None:
    snapshot = context.snapshot()
    mount("strip", _data(snapshot, context.selected_run()), "header")


def _data(snapshot: LiveSnapshot, run: str | None) -> dict[str, object]:
    state = snapshot.state
    common = {"now": time.time(), "note": access.note(), "down": snapshot.down}
    if state is None:
        name = f"Run {run} is not known here" if run else "No run"
        return common | {
            "name": name,
            "status": None,
            "emulated": False,
            "pairs": [],
            "updated_at": 0,
            "ended": False,
            "reason": "",
        }
    pairs = [
        ["generation", str(state.generation)],
        ["step", number(state.step)],
        ["policy", state.policy],
        ["device", bare_device(state.device)],
    ]
    return common | {
        "name": state.name,
        "status": status_look(state).data(),
        "emulated": state.emulated,
        "pairs": pairs,
        "updated_at": snapshot.updated_at,
        "ended": state.status in context.ENDED,
        "reason": state.status_reason,
    }
