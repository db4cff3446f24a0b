"""Confirmation dialogs. Each mints one command id when it opens, so a double click counts once; the
focus is on Cancel; what was refused stays open and says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import streamlit as st

from app import context
from app.commands import explain, mint
from app.components.parts import focus_on, shape_strip
from app.proposal_card import considered
from app.shapes import after_rows
from app.words import number, percent, seconds, split_title
from storage.records import CommandResult, Proposal

MAX_SENT = 5
FaultKind = Literal["kill", "slow", "repair"]
FAULT_WORDS: dict[FaultKind, str] = {
    "kill": "Kill the GPU's worker (SIGKILL), as if the GPU had died",
    "slow": "Slow the GPU down",
    "repair": "Repair the GPU: it is healthy again",
}


@st.dialog("Approve", width="medium")
def approve(proposal: Proposal, command: str) -> None:
    """Choose an option and confirm it."""
    details = [split_title(one.title)[1] for one in proposal.options]
    choices = [index for index, option in enumerate(proposal.options) if option.feasible]
    start = choices.index(proposal.recommended) if proposal.recommended in choices else 0
    chosen = st.radio(
        "Option",
        choices,
        index=start,
        format_func=lambda index: _option_label(proposal, index),
        captions=[details[index] for index in choices] if any(details) else None,
        key=f"option_{command}",
    )
    if chosen is None:
        st.markdown("No option is possible as the run stands. Reject it, or wait for the next one.")
        return
    option = proposal.options[chosen]
    shape_strip(after_rows(proposal.before, option), f"dialog_after_{command}", caption="After")
    st.markdown(
        f"Step time {seconds(option.step_s)}, {number(option.tokens_per_s)} tokens/s, goodput "
        f"{percent(option.goodput)}. Training pauses {seconds(option.cost_s)}. Risk: {option.risk}"
    )
    st.caption(
        f"Holds for generation {proposal.generation} only; the runtime checks again. "
        f"Recorded as {context.author().who}."
    )
    reason, missing = "", ""
    if chosen != proposal.recommended:
        reason = st.text_area(
            "Reason (required: this is not the recommended option)",
            key=f"reason_{command}",
            max_chars=500,
        ).strip()
        missing = "" if reason else "A reason is required: say why not the recommended option."
    send = lambda: context.commands().decide(  # noqa: E731
        command, proposal, "approved", chosen, reason
    )
    what = f"approve: {split_title(option.title)[0]}"
    buttons("Approve", command, proposal.run, what, send, missing)


@st.dialog("Reject")
def reject(proposal: Proposal, command: str) -> None:
    """Reject with a reason."""
    st.markdown(
        f"**{split_title(considered(proposal).title)[0]}** is not done; the run stays as it is."
    )
    reason = st.text_area(
        "Reason (required, recorded with the decision)", key=f"reason_{command}", max_chars=500
    )
    send = lambda: context.commands().decide(  # noqa: E731
        command, proposal, "rejected", reason=reason.strip()
    )
    missing = "" if reason.strip() else "A reason is required: say why it is rejected."
    buttons("Reject", command, proposal.run, "reject", send, missing)


@st.dialog("Emulated device")
def fault(run: str, gpu: str, failed: bool, command: str) -> None:
    """Break or repair one emulated GPU."""
    st.markdown(f"GPU **{gpu}**. This is possible because the run's devices are emulated.")
    kinds: list[FaultKind] = ["repair"] if failed else ["kill", "slow", "repair"]
    kind = st.radio(
        "Fault", kinds, format_func=lambda one: FAULT_WORDS[one], key=f"fault_{command}"
    )
    factor = 1.0
    if kind == "slow":
        factor = st.slider("Times slower", 1.1, 4.0, 1.5, 0.1, key=f"factor_{command}")
    send = lambda: context.commands().fault(command, run, gpu, kind, factor)  # noqa: E731
    buttons("Repair" if failed else "Inject", command, run, f"{kind} {gpu}", send)


def buttons(
    label: str,
    command: str,
    run: str,
    what: str,
    send: Callable[[], CommandResult],
    missing: str = "",
) -> None:
    """Cancel and confirm. `missing`: what must be filled in first, said when confirm is clicked."""
    key = f"result_{command}"
    result: CommandResult | None = st.session_state.get(key)
    if result is not None and result.ok:
        st.rerun()
    final = result is not None and result.code != "down"

    def submit() -> None:
        if missing or final:
            return
        answer = send()
        st.session_state[key] = answer
        remember(run, command, what, answer)
        context.reader().refresh(run)

    cancel, confirm = st.columns(2)
    close = "Close" if final else "Cancel"
    if cancel.button(close, key=f"cancel_{command}", width="stretch"):
        st.rerun()
    clicked = confirm.button(
        label,
        key=f"confirm_{command}",
        type="primary",
        width="stretch",
        on_click=submit,
        disabled=final,
    )
    if clicked and missing:
        st.error(missing)
    if result is not None and not result.ok:
        st.error(explain(result))
    focus_on(close, f"focus_{command}")


def _option_label(proposal: Proposal, index: int) -> str:
    option = proposal.options[index]
    note = ", recommended" if index == proposal.recommended else ""
    return f"{split_title(option.title)[0]} (goodput {percent(option.goodput)}{note})"


def open_approve(proposal: Proposal) -> None:
    approve(proposal, mint())


def open_reject(proposal: Proposal) -> None:
    reject(proposal, mint())


def remember(run: str, command: str, what: str, result: CommandResult) -> None:
    """Keep the session's last requests, to show what the runtime made of them."""
    sent = [one for one in st.session_state.get("sent", []) if one[1] != command]
    sent = [*sent, (run, command, what, result)]
    for _, forgotten, _, _ in sent[:-MAX_SENT]:
        st.session_state.pop(f"result_{forgotten}", None)
    st.session_state["sent"] = sent[-MAX_SENT:]
