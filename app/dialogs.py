"""Confirmation dialogs. Each mints one command id when it opens, so a double click counts once; the
focus is on Cancel; it closes when the runtime has done it, and what was refused stays open and says
why. What the person typed is read when they confirm: it may come with the click itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import streamlit as st

from app import context
from app.commands import explain, mint
from app.components.parts import focus_on, shape_strip
from app.proposal_card import considered
from app.shapes import after_rows
from app.words import number, percent, plural, seconds, split_title
from storage.commands import CommandResult
from storage.records import ActionKind, Proposal

MAX_SENT = 5
AWAIT_EVERY_S = 0.3
AWAIT_S = 15.0
NOT_ANSWERED = (
    "The runtime has not answered yet. It counts once whenever it does; see Your requests."
)
# What ends processes or gives up a replica: its name is to be typed.
DESTRUCTIVE: tuple[ActionKind, ...] = ("drop", "restart")
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
    if left := proposal.approvals_left - 1:
        st.caption(f"{plural(left, 'more person', 'more people')} must approve the same after you.")
    overrides = chosen != proposal.recommended
    if overrides:
        _reason(command, "Reason (required: this is not the recommended option)")
    kind = option.kind
    buttons(
        "Approve",
        command,
        proposal.run,
        f"approve: {split_title(option.title)[0]}",
        lambda: context.commands().decide(command, proposal, "approved", chosen, typed(command)),
        _must_say(command, "say why not the recommended option") if overrides else _nothing_missing,
        f"replica {proposal.replica}" if kind in DESTRUCTIVE else "",
    )


@st.dialog("Reject")
def reject(proposal: Proposal, command: str) -> None:
    """Reject with a reason."""
    st.markdown(
        f"**{split_title(considered(proposal).title)[0]}** is not done; the run stays as it is."
    )
    _reason(command, "Reason (required, recorded with the decision)")
    buttons(
        "Reject",
        command,
        proposal.run,
        "reject",
        lambda: context.commands().decide(command, proposal, "rejected", reason=typed(command)),
        _must_say(command, "say why it is rejected"),
    )


@st.dialog("Undo")
def undo(proposal: Proposal, command: str) -> None:
    """Ask for the inverse of an applied proposal."""
    done = split_title(considered(proposal).title)[0]
    st.markdown(
        f"**{done}** was applied. The planner works out how to take it back and what that brings; "
        "it becomes a proposal of its own, and nothing changes until that is approved."
    )
    _reason(command, "Reason (required, kept with the proposal)")
    buttons(
        "Ask",
        command,
        proposal.run,
        f"undo {proposal.id}",
        lambda: context.commands().undo(command, proposal, typed(command)),
        _must_say(command, "say why it is taken back"),
    )


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
    buttons(
        "Repair" if failed else "Inject",
        command,
        run,
        f"{kind} {gpu}",
        lambda: context.commands().fault(command, run, gpu, kind, factor),
        name=gpu if kind == "kill" else "",
    )


def typed(command: str) -> str:
    """The reason that was typed into the dialog of `command`."""
    return str(st.session_state.get(f"reason_{command}", "")).strip()


def _reason(command: str, label: str) -> None:
    st.text_area(label, key=f"reason_{command}", max_chars=500)


def _must_say(command: str, what: str) -> Callable[[], str]:
    return lambda: "" if typed(command) else f"A reason is required: {what}."


def _nothing_missing() -> str:
    return ""


def buttons(
    label: str,
    command: str,
    run: str,
    what: str,
    send: Callable[[], CommandResult],
    missing: Callable[[], str] = _nothing_missing,
    name: str = "",
) -> None:
    """Cancel and confirm.

    Args:
        missing: what must be filled in first, said when confirm is clicked; "" when nothing.
        name: to be typed before something is ended or given up; "" where it need not be.
    """
    key, name_key = f"result_{command}", f"name_{command}"
    result: CommandResult | None = st.session_state.get(key)
    final = result is not None and result.code != "down"
    if name:
        st.text_input(f"Type {name} to confirm", key=name_key, disabled=final)

    def lacks() -> str:
        if name and str(st.session_state.get(name_key, "")).strip() != name:
            return f"Type {name} first: this ends or gives up something."
        return missing()

    def submit() -> None:
        if final or lacks():
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
    if clicked and not final and (why := lacks()):
        st.error(why)
    if result is not None and result.ok:
        st.fragment(_await, run_every=AWAIT_EVERY_S)(run, command, result)
    elif result is not None:
        st.error(explain(result))
    focus_on(close, f"focus_{command}")


def _await(run: str, command: str, first: CommandResult) -> None:
    """Close the dialog once the runtime has done what was asked; say why when it has not."""
    answer = context.reader().result(run, command)
    if answer is None or answer.code == "accepted":
        waits = time.time() - first.at < AWAIT_S
        words = "Sent; waiting for the runtime." if waits else NOT_ANSWERED
        st.markdown(words)
    elif answer.ok:
        st.rerun()
    else:
        st.error(explain(answer))


def _option_label(proposal: Proposal, index: int) -> str:
    option = proposal.options[index]
    note = ", recommended" if index == proposal.recommended else ""
    return f"{split_title(option.title)[0]} (goodput {percent(option.goodput)}{note})"


def open_approve(proposal: Proposal) -> None:
    approve(proposal, mint())


def open_reject(proposal: Proposal) -> None:
    reject(proposal, mint())


def open_undo(proposal: Proposal) -> None:
    undo(proposal, mint())


def remember(run: str, command: str, what: str, result: CommandResult) -> None:
    """Keep the session's last requests, to show what the runtime made of them."""
    sent = [one for one in st.session_state.get("sent", []) if one[1] != command]
    sent = [*sent, (run, command, what, result)]
    for _, forgotten, _, _ in sent[:-MAX_SENT]:
        st.session_state.pop(f"result_{forgotten}", None)
    st.session_state["sent"] = sent[-MAX_SENT:]
