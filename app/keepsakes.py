"""Notes and tags of a run, its report and its exports."""

from __future__ import annotations

import time

import streamlit as st

from app import context
from app.commands import mint
from app.components.parts import Column, Row, table
from app.exports import as_csv, as_parquet
from app.lookback import PastRun
from app.report import report
from storage.commands import Report
from storage.history.notes import MAX_TEXT, Note

NOTE_COLUMNS = (
    Column(label="When", kind="right"),
    Column(label="Who"),
    Column(label="Note", kind="wide"),
)


def render(past: PastRun) -> None:
    """One row of controls below the numbers of a run."""
    with st.container(horizontal=True, gap="small"):
        with st.popover("Notes and tags", width="content"):
            _notes(past)
        _downloads(past)
    if past.notes:
        rows = [Row(id=one.id, cells=({"time": one.at}, one.who, one.text)) for one in past.notes]
        table(NOTE_COLUMNS, rows, "notes", label="Notes", empty="", max_height=160)


def _notes(past: PastRun) -> None:
    run, who = past.detail.run, context.author().who
    tags = st.text_input(
        "Tags, separated by commas", value=", ".join(past.detail.tags), key=f"tags_{run}"
    )
    text = st.text_area("New note", max_chars=MAX_TEXT, key=f"note_{run}")
    command = st.session_state.setdefault(f"note_id_{run}", mint())
    lacks = context.lacks(Report)
    if st.button("Keep", key=f"keep_{run}", type="primary", disabled=bool(lacks)) and not lacks:
        trouble = context.lookback().set_tags(run, tags.split(","), who)
        if not trouble and text.strip():
            note = Note(id=command, at=time.time(), who=who, text=text.strip())
            trouble = context.lookback().add_note(run, note)
        if trouble:
            st.error(trouble)
            return
        st.session_state.pop(f"note_id_{run}", None)
        st.session_state.pop(f"note_{run}", None)
        st.rerun()
    st.caption(lacks or f"Recorded as {who}. Notes cannot be changed afterwards.")


def _downloads(past: PastRun) -> None:
    run = past.detail.run
    lookback = context.lookback()
    who = context.author().who

    def as_report() -> bytes:
        return report(past, lookback.incidents(run), time.time(), who).encode()

    st.download_button(
        "Report (HTML)",
        as_report,
        file_name=f"{run}.html",
        mime="text/html",
        on_click="ignore",
        key=f"report_{run}",
    )
    st.download_button(
        "Steps (CSV)",
        lambda: as_csv(lookback.step_columns(run)),
        file_name=f"{run}-steps.csv",
        mime="text/csv",
        on_click="ignore",
        key=f"csv_{run}",
    )
    st.download_button(
        "Steps (Parquet)",
        lambda: as_parquet(lookback.step_columns(run)),
        file_name=f"{run}-steps.parquet",
        mime="application/vnd.apache.parquet",
        on_click="ignore",
        key=f"parquet_{run}",
    )
