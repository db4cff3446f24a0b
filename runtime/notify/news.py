"""Which entries of a run's journal are news, and the notices they make. Pure.

`RunNews` is all that must be remembered between two readings; it is plain data and can be written
down. The same entries give the same notices with the same ids, and each is given once.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from runtime.notify.notice import Notice, NoticeKind
from storage.history.incidents import CLEARING_KINDS, Incident, begins, incidents_of
from storage.records import (
    DecisionMade,
    EventHappened,
    GenerationFormed,
    JournalEntry,
    Proposal,
    ProposalChanged,
    RunEnded,
    RunStarted,
    Severity,
)

KEPT_ENTRIES = 4000
KEPT_TOLD = 2000
KEPT_TITLES = 200
# The same trouble again within this time is not told again
SAME_TROUBLE_S = 600.0


class RunNews(msgspec.Struct, kw_only=True):
    """What is known of `run`. seq: of the newest entry taken. kept: what open incidents are made
    of. told: ids of notices given. titles: proposal -> what it proposes."""

    run: str
    seq: int = 0
    name: str = ""
    kept: list[GenerationFormed | EventHappened] = []
    told: list[str] = []
    titles: dict[str, str] = {}


def take(news: RunNews, entries: Iterable[JournalEntry], since: float) -> list[Notice]:
    """Take entries in order of seq (older ones are ignored); the notices they make.

    since: what happened before is not told, but remembered as told.
    """
    made: list[Notice] = []
    changed = False
    for entry in entries:
        if entry.seq <= news.seq:
            continue
        news.seq = entry.seq
        if isinstance(entry, RunStarted):
            news.name = entry.name
        elif isinstance(entry, GenerationFormed) or _counts(entry):
            news.kept.append(entry)  # type: ignore[arg-type]
            changed = True
        made += _of_entry(news, entry)
    if changed:
        made += _of_incidents(news)
    known = set(news.told)
    fresh: dict[str, Notice] = {}
    for one in made:
        if one.id not in known:
            fresh.setdefault(one.id, one)
    news.told = [*news.told, *fresh][-KEPT_TOLD:]
    return sorted((one for one in fresh.values() if one.at >= since), key=lambda one: one.at)


def _counts(entry: JournalEntry) -> bool:
    """Whether an event can open, feed or end an incident."""
    if not isinstance(entry, EventHappened):
        return False
    return begins(entry) or entry.kind in CLEARING_KINDS


def _of_entry(news: RunNews, entry: JournalEntry) -> list[Notice]:
    if isinstance(entry, ProposalChanged):
        return _of_proposal(news, entry)
    if isinstance(entry, DecisionMade):
        return [_of_decision(news, entry)]
    if isinstance(entry, EventHappened) and entry.severity == "critical" and not begins(entry):
        # Belongs to no incident: the run rolled back, stalls, cannot write a checkpoint
        key = f"{entry.kind}:{entry.at // SAME_TROUBLE_S:.0f}"
        said = (entry.severity, entry.message, "")
        return [_notice(news, entry, "run_in_trouble", said, key)]
    if isinstance(entry, RunEnded) and entry.status == "failed":
        title = f"Run {news.name or entry.run} failed"
        return [
            _notice(
                news, entry, "run_failed", ("critical", title, entry.reason), f"run:{entry.run}"
            )
        ]
    return []


def _of_proposal(news: RunNews, entry: ProposalChanged) -> list[Notice]:
    proposal = entry.proposal
    index = proposal.recommended if proposal.chosen is None else proposal.chosen
    title = proposal.options[index].title.partition(": ")[0]
    news.titles[proposal.id] = title
    while len(news.titles) > KEPT_TITLES:
        del news.titles[next(iter(news.titles))]
    kinds: dict[str, tuple[NoticeKind, Severity, str, str]] = {
        "open": (
            "proposal_opened", "warning", f"Waits for a decision: {title}", _offer(proposal),
        ),
        "expired": ("proposal_expired", "warning", f"Expired undecided: {title}", proposal.cause),
        "failed": ("proposal_failed", "critical", f"Failed: {title}", proposal.state_reason),
    }  # fmt: skip
    if proposal.state not in kinds:
        return []
    kind, severity, head, text = kinds[proposal.state]
    made = _notice(news, entry, kind, (severity, head, text), f"{proposal.id}:{proposal.state}")
    return [msgspec.structs.replace(made, proposal=proposal.id, replica=proposal.replica)]


def _offer(proposal: Proposal) -> str:
    option = proposal.options[proposal.recommended]
    minutes = max(0.0, proposal.expires_at - proposal.created_at) / 60
    return (
        f"Cause: {proposal.cause}\n"
        f"Predicted: {option.goodput:.1%} of the healthy goodput, {option.step_s:.2f} s a step\n"
        f"Replica {proposal.replica}, generation {proposal.generation}; "
        f"expires {minutes:.0f} min after it was made"
    )


def _of_decision(news: RunNews, entry: DecisionMade) -> Notice:
    title = news.titles.get(entry.proposal, f"proposal {entry.proposal}")
    said = entry.verdict.replace("_", " ").capitalize()
    head = f"{said} by {entry.who}: {title}"
    key = f"{entry.proposal}:decision:{entry.id}"
    made = _notice(news, entry, "decision_made", ("info", head, entry.reason), key)
    return msgspec.structs.replace(made, proposal=entry.proposal)


def _of_incidents(news: RunNews) -> list[Notice]:
    forms = [one for one in news.kept if isinstance(one, GenerationFormed)]
    events = [one for one in news.kept if isinstance(one, EventHappened)]
    severity = {f"i{one.seq}": one.severity for one in events}
    found = incidents_of(forms, events, [], [], until=max(one.at for one in news.kept))
    made = []
    for one in found:
        where = f"Replica {one.replica}" + (f", GPU {', '.join(one.gpus)}" if one.gpus else "")
        opened = Notice(
            id=f"{news.run}:{one.id}:opened",
            kind="incident_opened",
            at=one.begin,
            run=news.run,
            run_name=news.name or news.run,
            severity=severity.get(one.id, "warning"),
            title=one.title,
            text=where,
            incident=one.id,
            gpu=one.gpus[0] if one.gpus else "",
            replica=one.replica,
        )
        made.append(opened)
        if one.end is not None:
            closed = msgspec.structs.replace(
                opened,
                id=f"{news.run}:{one.id}:closed",
                kind="incident_closed",
                at=one.end,
                severity="info",
                title=f"Recovered: {one.title}",
                text=f"{where}\nVerified: {one.verified}\nIt lasted {one.end - one.begin:.0f} s",
            )
            made.append(closed)
    _forget(news, forms, [one for one in found if one.is_open])
    return made


def _forget(news: RunNews, forms: list[GenerationFormed], still_open: list[Incident]) -> None:
    """Keep what open incidents are made of, and the shape that stood before."""
    first = min((int(one.id.removeprefix("i")) for one in still_open), default=news.seq + 1)
    before = [one for one in forms if one.seq < first][-1:]
    kept = [*before, *(one for one in news.kept if one.seq >= first)]
    news.kept = kept[-KEPT_ENTRIES:]


def _notice(
    news: RunNews,
    entry: JournalEntry,
    kind: NoticeKind,
    said: tuple[Severity, str, str],
    key: str,
) -> Notice:
    severity, title, text = said
    return Notice(
        id=f"{entry.run}:{key}",
        kind=kind,
        at=entry.at,
        run=entry.run,
        run_name=news.name or entry.run,
        severity=severity,
        title=title,
        text=text,
    )
