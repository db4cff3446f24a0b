"""The audit on the History page: who asked for what, in which role, why, and what came of it."""

from __future__ import annotations

import streamlit as st

from app import context
from app.components.parts import Column, Row, table
from app.words import plural
from storage.audit import AuditRow

SHOWN = 200
COLUMNS = (
    Column(label="No", kind="right"),
    Column(label="When", kind="right"),
    Column(label="Who"),
    Column(label="Role"),
    Column(label="By"),
    Column(label="What", kind="wide"),
    Column(label="Why", kind="wide"),
    Column(label="Result", kind="wide"),
)
NOTHING = (
    "No row matches. Every command, carried out or refused, every decision of policy and every "
    "sign-in is listed here."
)


def render(run: str | None) -> None:
    """The newest rows, of all runs or of `run`; nobody can change or remove one."""
    search, only = st.columns([3, 2], vertical_alignment="center")
    words = search.text_input(
        "Search the audit",
        placeholder="Search who, role, what, why, result",
        label_visibility="collapsed",
        key="audit_search",
    )
    mine = run is not None and only.checkbox(f"Only run {run}", key="audit_only")
    rows, trouble = context.lookback().audit(words.strip(), run if mine and run else "", SHOWN)
    if trouble:
        st.markdown(trouble)
        return
    table(COLUMNS, [_row(one) for one in rows], "audit", label="Audit", empty=NOTHING)
    if len(rows) == SHOWN:
        st.caption(f"The newest {SHOWN} that match. All of them: `counterpoise audit list`.")
    if st.button("Verify the chain", key="audit_verify"):
        st.markdown(_verified())


def _verified() -> str:
    found, trouble = context.lookback().verify_audit()
    if found is None:
        return trouble
    if found.ok:
        return f"Unbroken: {plural(found.num_rows, 'row')}. Head {found.num_rows}:`{found.head}`"
    where = f"Row {found.broken}" if found.broken is not None else "The audit"
    return f"**Broken.** {where}: {found.why}. {plural(found.num_rows, 'row')} before it are good."


def _row(row: AuditRow) -> Row:
    what = {"text": row.what, "sub": row.run} if row.run else row.what
    return Row(
        id=str(row.number),
        cells=(
            str(row.number), {"time": row.at}, row.who, row.role, row.via, what, row.reason,
            row.result,
        ),
    )  # fmt: skip
