"""Incidents: a replica's trouble from the first evidence to the verified recovery.

Pure: derived from the records of a run, live or past, and from nothing else. Each instant of an
incident belongs to one part, named by what was being waited for. What it cost is in
`storage.history.incident_costs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from storage.records import DecisionMade, EventHappened, GenerationFormed, Proposal, ReplicaState

Part = Literal["detected", "proposed", "waited", "applied", "reduced"]
PARTS: tuple[Part, ...] = ("detected", "proposed", "waited", "applied", "reduced")
# Evidence that is older than this was not what the first event was about
EVIDENCE_S = 120.0
DEAD_KINDS = ("gpu_failed", "rank_fenced")
RACK_KINDS = ("switch_failed",)
# What concerns the whole run is part of every incident that is open then
RUN_KINDS = ("run_rolled_back", "run_paused", "run_resumed")
CLEARING_KINDS = ("gpu_repaired", "gpu_cleared", "gpu_recovered")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One line of a timeline. kind: "evidence", "event", "generation", "proposal", "decision",
    "recovery"."""

    at: float
    kind: str
    text: str
    severity: str = "info"
    proposal: str = ""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """[begin, end) of an incident in which one part went on."""

    part: Part
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Incident:
    """id: lasting, for addresses. end: None while it is open. verified: how recovery was seen."""

    id: str
    replica: int
    gpus: tuple[str, ...]
    title: str
    begin: float
    end: float | None
    moments: tuple[Moment, ...]
    stretches: tuple[Stretch, ...]
    proposals: tuple[str, ...]
    verified: str = ""

    @property
    def is_open(self) -> bool:
        return self.end is None


@dataclass
class _Draft:
    replica: int
    events: list[EventHappened] = field(default_factory=list)
    formed: list[GenerationFormed] = field(default_factory=list)
    was_reduced: bool = False
    end: float | None = None
    verified: str = ""

    @property
    def is_dead(self) -> bool:
        return any(one.kind in DEAD_KINDS for one in self.events)


def incidents_of(
    generations: Sequence[GenerationFormed],
    events: Sequence[EventHappened],
    proposals: Sequence[Proposal],
    decisions: Sequence[DecisionMade],
    until: float,
) -> list[Incident]:
    """All incidents of a run, oldest first. until: now, or the end of the run."""
    drafts = _drafts(generations, events)
    found = []
    for draft in drafts:
        begin, end = draft.events[0].at, until if draft.end is None else draft.end
        own = [
            one
            for one in sorted(proposals, key=lambda one: one.created_at)
            if one.replica == draft.replica and begin - 1.0 <= one.created_at <= end
        ]
        answers = [one for one in decisions if one.proposal in {each.id for each in own}]
        found.append(_incident(draft, own, answers, end))
    return found


def is_whole(replica: ReplicaState) -> bool:
    """Every slot is live and trains."""
    return replica.mode == "training" and len(replica.live) == len(replica.gpus)


def begins(event: EventHappened) -> bool:
    """Whether an event begins an incident of its replica, unless one is open."""
    return event.severity != "info" and (bool(event.gpu) or event.kind in RACK_KINDS)


def _drafts(
    generations: Sequence[GenerationFormed], events: Sequence[EventHappened]
) -> list[_Draft]:
    """Which events and generations belong together, in the order of the first event."""
    replica_of = {
        gpu: one.replica for form in generations for one in form.replicas for gpu in one.gpus
    }
    open_: dict[int, _Draft] = {}
    drafts: list[_Draft] = []
    entries: list[GenerationFormed | EventHappened] = [*generations, *events]
    for entry in sorted(entries, key=lambda one: (one.at, one.seq)):
        if isinstance(entry, GenerationFormed):
            for replica in entry.replicas:
                if (draft := open_.get(replica.replica)) and _forms(draft, entry, replica):
                    del open_[replica.replica]
            continue
        if entry.kind in RUN_KINDS:
            for draft in open_.values():
                draft.events.append(entry)
        number = entry.replica if entry.replica is not None else replica_of.get(entry.gpu or "")
        if number is None:
            continue
        if number not in open_ and begins(entry):
            open_[number] = _Draft(replica=number)
            drafts.append(open_[number])
        if (draft := open_.get(number)) is not None:
            draft.events.append(entry)
            if entry.kind in CLEARING_KINDS and not draft.was_reduced and not draft.is_dead:
                draft.end, draft.verified = entry.at, entry.message
                del open_[number]
    return drafts


def _forms(draft: _Draft, form: GenerationFormed, replica: ReplicaState) -> bool:
    """Note a generation in an open incident; True when it is the recovery."""
    draft.formed.append(form)
    if not is_whole(replica):
        draft.was_reduced = True
        return False
    if not draft.was_reduced and not draft.is_dead:
        return False  # a slow GPU is not well because another replica changed
    draft.end = form.at
    draft.verified = (
        f"generation {form.generation} committed step {form.first_step} "
        f"with all {len(replica.gpus)} slots of replica {replica.replica}"
    )
    return True


def _incident(
    draft: _Draft, proposals: list[Proposal], decisions: list[DecisionMade], end: float
) -> Incident:
    first = draft.events[0]
    evidence = {
        (at, text)
        for one in proposals
        for at, text in one.evidence
        if first.at - EVIDENCE_S <= at <= end
    }
    begin = min([first.at, *(at for at, _ in evidence)])
    marks = _marks(draft, proposals, decisions)
    gpus = dict.fromkeys(one.gpu for one in draft.events if one.gpu and one.severity != "info")
    return Incident(
        id=f"i{first.seq}",
        replica=draft.replica,
        gpus=tuple(gpu for gpu in gpus if gpu),
        title=first.message,
        begin=begin,
        end=draft.end,
        moments=_moments(draft, proposals, decisions, evidence),
        stretches=_stretches(begin, first.at, end, marks),
        proposals=tuple(one.id for one in proposals),
        verified=draft.verified,
    )


def _marks(
    draft: _Draft, proposals: list[Proposal], decisions: list[DecisionMade]
) -> list[tuple[float, Part]]:
    """From when on which part goes on."""
    marks: list[tuple[float, Part]] = []
    answered = {one.proposal: one for one in decisions}
    for one in proposals:
        marks.append((one.created_at, "waited"))
        decided_at = one.decided_at or (answered[one.id].at if one.id in answered else None)
        if one.state in ("approved", "applying", "applied", "failed") and decided_at:
            marks.append((decided_at, "applied"))
        elif one.state == "rejected" and decided_at:
            marks.append((decided_at, "reduced"))
        elif one.state == "expired":
            marks.append((one.expires_at, "reduced"))
    ids = {one.id for one in proposals}
    marks += [(one.at, "reduced") for one in draft.formed if one.proposal in ids]
    # A further failure, or a repair, asks for a new proposal
    marks += [
        (one.at, "proposed")
        for one in draft.events[1:]
        if one.kind in DEAD_KINDS or one.kind in CLEARING_KINDS
    ]
    return sorted(marks, key=lambda mark: mark[0])


def _stretches(
    begin: float, known_at: float, end: float, marks: list[tuple[float, Part]]
) -> tuple[Stretch, ...]:
    """Contiguous from `begin` to `end`; equal neighbours are one."""
    starts: list[tuple[float, Part]] = [(begin, "detected"), (known_at, "proposed")]
    starts += [(max(at, known_at), part) for at, part in marks]
    ends = [*(at for at, _ in starts[1:]), end]
    found: list[Stretch] = []
    for (at, part), stop in zip(starts, ends, strict=True):
        stop = min(stop, end)  # noqa: PLW2901
        if stop <= at:
            continue
        if found and found[-1].part == part:
            found[-1] = replace(found[-1], end=stop)
        else:
            found.append(Stretch(part=part, begin=at, end=stop))
    return tuple(found)


def _moments(
    draft: _Draft,
    proposals: list[Proposal],
    decisions: list[DecisionMade],
    evidence: set[tuple[float, str]],
) -> tuple[Moment, ...]:
    found = [Moment(at=at, kind="evidence", text=text) for at, text in evidence]
    found += [
        Moment(at=one.at, kind="event", text=one.message, severity=one.severity)
        for one in draft.events
    ]
    found += [
        Moment(
            at=one.at,
            kind="generation",
            text=f"generation {one.generation} committed its first step: {one.cause}",
            proposal=one.proposal,
        )
        for one in draft.formed
    ]
    for proposal in proposals:
        option = proposal.options[proposal.recommended]
        text = f"proposed: {option.title.partition(': ')[0]}"
        found.append(
            Moment(at=proposal.created_at, kind="proposal", text=text, proposal=proposal.id)
        )
        if proposal.state == "expired":
            found.append(
                Moment(
                    at=proposal.expires_at,
                    kind="proposal",
                    text="the proposal expired undecided",
                    severity="warning",
                    proposal=proposal.id,
                )
            )
    for one in decisions:
        why = f": {one.reason}" if one.reason else ""
        verdict = one.verdict.replace("_", " ")
        text = f"{verdict} by {one.who} ({one.via}){why}"
        found.append(Moment(at=one.at, kind="decision", text=text, proposal=one.proposal))
    if draft.end is not None:
        text = f"recovered, verified: {draft.verified}"
        found.append(Moment(at=draft.end, kind="recovery", text=text))
    order = ("evidence", "event", "proposal", "decision", "generation", "recovery")
    return tuple(sorted(found, key=lambda one: (one.at, order.index(one.kind))))
