"""The policy on the page: what holds now and why, its last changes, the dialog that changes it."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app import context
from app.commands import mint
from app.components.parts import Column, Row, heading, table
from app.dialogs import buttons, typed
from app.words import seconds
from storage.commands import SetPolicy
from storage.policy_state import (
    ANSWER_WORDS,
    ANSWERS,
    DECIDERS,
    MODE_MEANS,
    MODE_WORDS,
    MODES,
    POLICY_KINDS,
    PolicyState,
)
from storage.records import RunState

RULE_COLUMNS = (
    Column(label="Action"),
    Column(label="Now", kind="wide", title="what comes of such a proposal at this hour"),
    Column(label="Its own answer", kind="wide"),
    Column(label="Approvals", kind="right", title="by different people"),
    Column(label="Decided by"),
)
CHANGE_COLUMNS = (
    Column(label="Changed", kind="right"),
    Column(label="By"),
    Column(label="What", kind="wide"),
    Column(label="Why", kind="wide"),
)
DURATIONS = {
    "expires_s": "A proposal expires after, s",
    "deadline_s": "The deadline of automatic after the deadline, s",
    "evidence_max_age_s": "Evidence is too old to approve on after, s",
}
EXAMPLE = '{ begin = "22:00", end = "06:00", zone = "Europe/Berlin", mode = "act" }'


def policy_panel(state: RunState) -> None:
    """What holds now, what changed, and a button to change it."""
    policy = state.policy_state
    heading("Policy")
    if policy is None:
        st.markdown("The runtime of this run says nothing of its policy.")
        return
    why = f" ({policy.quiet})" if policy.quiet else ""
    st.markdown(f"**{_first_up(MODE_WORDS[policy.mode])}**{why}: {MODE_MEANS[policy.mode]}.")
    rows = [
        Row(
            id=rule.kind,
            cells=(
                rule.kind,
                ANSWER_WORDS[rule.answer],
                ANSWER_WORDS[rule.own],
                str(rule.num_approvals),
                f"{rule.decider} or higher",
            ),
        )
        for rule in policy.rules
    ]
    table(RULE_COLUMNS, rows, "policy_rules", label="Policy by kind of action", empty="")
    st.caption(_times(policy.values))
    change, reason = st.columns([1, 4], vertical_alignment="center")
    lacks = context.lacks(SetPolicy)
    if change.button("Change…", key="policy_change", width="stretch", disabled=bool(lacks)):
        _dialog(state.run, policy, mint())
    if lacks:
        reason.caption(lacks)
    _changes(policy)


def _times(values: dict[str, Any]) -> str:
    spans = (
        f"A proposal expires after {seconds(values['expires_s'])}; a deadline is "
        f"{seconds(values['deadline_s'])}; evidence older than "
        f"{seconds(values['evidence_max_age_s'])} carries no approval. "
    )
    windows = [_inline(one) for one in values["quiet_hours"]]
    return spans + (f"Quiet hours: {', '.join(windows)}." if windows else "No quiet hours.")


def _changes(policy: PolicyState) -> None:
    rows = [
        Row(id=str(one.revision), cells=({"time": one.at}, one.who, one.words, one.reason))
        for one in reversed(policy.changes)
    ]
    table(
        CHANGE_COLUMNS,
        rows,
        "policy_changes",
        label="Changes of the policy",
        empty="Unchanged since the run began. Changes are kept in History as events, too.",
    )


@st.dialog("Change the policy", width="medium")
def _dialog(run: str, policy: PolicyState, command: str) -> None:
    """Every key of the policy; what differs when it is confirmed is sent, with a reason."""
    values = policy.values
    st.selectbox(
        "Mode",
        MODES,
        index=MODES.index(values["mode"]),
        format_func=lambda one: f"{MODE_WORDS[one]}: {MODE_MEANS[one]}",
        key=_key(command, "mode"),
    )
    for kind in POLICY_KINDS:
        answer, people, decider = st.columns([2, 1, 1])
        answer.selectbox(
            _first_up(kind), ANSWERS, index=ANSWERS.index(values[kind]),
            format_func=lambda one: ANSWER_WORDS[one], key=_key(command, kind),
        )  # fmt: skip
        people.number_input(
            "Approvals", 1, 5, values["approvals"][kind], key=_key(command, f"approvals.{kind}")
        )
        decider.selectbox(
            "Decided by", DECIDERS, index=DECIDERS.index(values["deciders"][kind]),
            key=_key(command, f"deciders.{kind}"),
        )  # fmt: skip
    for name, label in DURATIONS.items():
        st.number_input(
            label, 1.0, 86_400.0, float(values[name]), 10.0, "%g", key=_key(command, name)
        )
    st.text_area(
        "Quiet hours, one a line",
        "\n".join(_inline(one) for one in values["quiet_hours"]),
        placeholder=EXAMPLE,
        key=_key(command, "quiet_hours"),
    )
    st.text_area("Reason (required, recorded)", key=f"reason_{command}", max_chars=500)

    def missing() -> str:
        if not _changed(values, command):
            return "Nothing is changed yet."
        return "" if typed(command) else "A reason is required: say why the policy changes."

    buttons(
        "Change",
        command,
        run,
        "change the policy",
        lambda: context.commands().set_policy(
            command, run, _changed(values, command), policy.revision, typed(command)
        ),
        missing,
    )


def _key(command: str, name: str) -> str:
    return f"policy_{name}_{command}"


def _changed(values: dict[str, Any], command: str) -> dict[str, str]:
    """Key -> value as TOML of what the dialog's fields say differently from `values`."""
    found: dict[str, str] = {}
    for name in ("mode", *POLICY_KINDS):
        if (picked := st.session_state.get(_key(command, name))) not in (None, values[name]):
            found[name] = f'"{picked}"'
    for table_name in ("approvals", "deciders"):
        for kind in POLICY_KINDS:
            name = f"{table_name}.{kind}"
            picked = st.session_state.get(_key(command, name))
            if picked not in (None, values[table_name][kind]):
                found[name] = f'"{picked}"' if table_name == "deciders" else str(picked)
    for name in DURATIONS:
        if (picked := st.session_state.get(_key(command, name))) not in (None, values[name]):
            found[name] = str(picked)
    lines = str(st.session_state.get(_key(command, "quiet_hours"), "")).split("\n")
    wanted = [line.strip().rstrip(",") for line in lines if line.strip()]
    if wanted != [_inline(one) for one in values["quiet_hours"]]:
        found["quiet_hours"] = f"[{', '.join(wanted)}]"
    return found


def _inline(window: dict[str, Any]) -> str:
    """One quiet window as an inline table of TOML."""

    def text(value: Any) -> str:
        return (
            f"[{', '.join(map(text, value))}]" if isinstance(value, list | tuple) else f'"{value}"'
        )

    return "{ " + ", ".join(f"{name} = {text(value)}" for name, value in window.items()) + " }"


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]
