"""A proposal as a card: head with life and countdown, before and after, alternatives, actual beside
predicted.
"""

from __future__ import annotations

import time
from typing import Any

import streamlit as st

from app import context
from app.commands import Author
from app.components.parts import Column, Row, shape_strip, table
from app.components.registry import mount
from app.palette import PROPOSAL_LOOKS
from app.rights import why_not_approve
from app.shapes import after_rows, before_rows
from app.words import ACTION_WORDS, number, percent, seconds, split_title
from storage.records import Option, Proposal, ProposalState

PATH: tuple[ProposalState, ...] = ("open", "approved", "applying", "applied")
OPTION_COLUMNS = (
    Column(label="Option", kind="wide"),
    Column(label="Step time", kind="right"),
    Column(label="Tokens/s", kind="right"),
    Column(label="Goodput", kind="right", title="token goodput while it stands"),
    Column(label="Pause", kind="right", title="how long training pauses to get there"),
    Column(label="Risk", kind="wide"),
)


def card_head(proposal: Proposal, key: str) -> None:
    """What, why, evidence, countdown and life."""
    mount("card", head_data(proposal, context.author(), time.time()), f"card_{key}")


def card_line(proposal: Proposal, key: str) -> None:
    """The same in short: what waits, what it would bring, how long it may be decided."""
    option = considered(proposal)
    effect = (
        f"step time {seconds(option.step_s)}, {number(option.tokens_per_s)} tokens/s, "
        f"goodput {percent(option.goodput)}, pause {seconds(option.cost_s)}"
    )
    data = head_data(proposal, context.author(), time.time())
    facts = [["predicted", effect]]
    if proposal.approvals:
        facts.append(["approvals", proposal.progress])
    short = {"compact": True, "facts": facts}
    mount("card", data | short, f"line_{key}")


def card_body(proposal: Proposal, batch: int, key: str) -> None:
    """Before and after, then the alternatives side by side, then what was measured."""
    option = considered(proposal)
    left, right = st.columns(2)
    with left:
        before = before_rows(proposal.before, proposal.options, batch)
        shape_strip(before, f"before_{key}", caption="Before")
    with right:
        after = after_rows(proposal.before, option)
        shape_strip(after, f"after_{key}", caption=f"After: {split_title(option.title)[0]}")
    table(
        OPTION_COLUMNS,
        option_rows(proposal),
        f"options_{key}",
        label="Options and their predicted effect",
        empty="The planner compared nothing.",
    )


def considered(proposal: Proposal) -> Option:
    """The option that was approved, else the recommended one."""
    return proposal.options[proposal.recommended if proposal.chosen is None else proposal.chosen]


def option_rows(proposal: Proposal) -> list[Row]:
    """Every option with its prediction; below, when it is applied, what was measured."""
    rows = []
    for index, option in enumerate(proposal.options):
        tags = []
        if index == proposal.recommended:
            tags.append("recommended")
        if index == proposal.chosen:
            tags.append("approved")
        short, detail = split_title(option.title)
        if tags:
            short = f"{short} ({', '.join(tags)})"
        title = {"text": short, "sub": detail} if detail else short
        rows.append(Row(id=str(index), cells=_option_cells(title, option), strong=bool(tags)))
    if (outcome := proposal.outcome) is not None:
        measured = outcome.num_steps > 0
        cells = (
            f"Actual, measured over {outcome.num_steps} steps" if measured else "Actual",
            seconds(outcome.step_s) if measured else "measuring",
            number(outcome.tokens_per_s) if measured else "measuring",
            percent(outcome.goodput) if measured else "measuring",
            seconds(outcome.first_commit_s),
            f"generation {outcome.generation} stands",
        )
        rows.append(Row(id="actual", cells=cells, strong=True))
    return rows


def _option_cells(title: Any, option: Option) -> tuple[Any, ...]:
    if not option.feasible:
        return (title, "", "", "", "", f"not possible: {option.reason}")
    return (
        title,
        seconds(option.step_s),
        number(option.tokens_per_s),
        percent(option.goodput),
        seconds(option.cost_s),
        option.risk,
    )


def head_data(proposal: Proposal, author: Author, now: float) -> dict[str, Any]:
    """Data of the card component."""
    look = PROPOSAL_LOOKS[proposal.state]
    waits = proposal.state == "open"
    facts = [["computed for", f"generation {proposal.generation}, revision {proposal.revision}"]]
    if waits:
        facts[0][1] += "; it can be approved only while that generation stands"
        facts.append(["who may decide", _deciders(proposal, author)])
    if proposal.ruling:
        facts.append(["policy", proposal.ruling.removeprefix("policy: ")])
    if proposal.asked_by:
        facts.append(["asked for by", proposal.asked_by])
    if proposal.undoes:
        facts.append(["takes back", proposal.undoes])
    if proposal.decided_by:
        facts.append(["decided by", proposal.decided_by])
    return {
        "title": f"{_first_up(ACTION_WORDS[proposal.kind])} replica {proposal.replica}",
        "cause": proposal.cause,
        "look": look.data(),
        "life": life(proposal.state),
        "why": proposal.state_reason or (waits and proposal.barred and _barred(proposal)) or "",
        "evidence": [list(one) for one in proposal.evidence],
        "evidence_until": _evidence_until(proposal) if waits else 0,
        "approvals": _approvals(proposal),
        "created_at": proposal.created_at,
        "expires_at": proposal.expires_at if waits else 0,
        "auto_at": proposal.auto_at if waits else None,
        "facts": facts,
        "now": now,
    }


def _deciders(proposal: Proposal, author: Author) -> str:
    several = f"{proposal.approvals_needed} different people of " if proposal.progress else ""
    why = why_not_approve(proposal, author)
    you = why or f"you may, as {author.who} ({author.role})"
    return f"{several}the role {proposal.decider} or higher; {you}"


def _barred(proposal: Proposal) -> str:
    return f"Nobody can approve it now: {proposal.barred}."


def _evidence_until(proposal: Proposal) -> float:
    """Until when its evidence carries an approval (epoch seconds), 0 when for ever."""
    limit_s = proposal.evidence_max_age_s
    return proposal.evidence_at + limit_s if limit_s > 0 else 0.0


def _approvals(proposal: Proposal) -> dict[str, Any] | None:
    """How many of how many, by whom and when; None where one is enough."""
    if not proposal.progress:
        return None
    short = [split_title(proposal.options[one.option].title)[0] for one in proposal.approvals]
    given = [
        [one.at, f"{one.who}: {title}{f' ({one.reason})' if one.reason else ''}"]
        for one, title in zip(proposal.approvals, short, strict=True)
    ]
    return {"count": f"{len(given)} of {proposal.approvals_needed}", "given": given}


def life(state: ProposalState) -> list[list[str]]:
    """The stations of a proposal, each "past", "now" or "ahead"."""
    if state in PATH:
        at = PATH.index(state)
        places = ["past" if i < at else "now" if i == at else "ahead" for i in range(len(PATH))]
        return [[word, place] for word, place in zip(PATH, places, strict=True)]
    before = PATH[:3] if state == "failed" else PATH[:1]
    return [*([word, "past"] for word in before), [state, "now"]]


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]
