"""The book of a run's proposals: every one in its newest form, and what it stands and falls with.

It knows states and revisions, not what a proposal means nor who may decide. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from runtime.control.fleet import Facts
from runtime.control.instructions import Outgoing, Publish
from runtime.plan.generation import GenerationPlan
from storage.records import Proposal, ProposalState

KEPT_PROPOSALS = 200
_UNDER_WAY: tuple[ProposalState, ...] = ("approved", "applying")


class Book:
    """Keeps the proposals of one run and publishes every change of them."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._proposals: dict[str, Proposal] = {}
        self._facts: dict[str, Facts | None] = {}
        self.num_opened = 0

    # what is in it ---------------------------------------------------------------------------

    def get(self, proposal: str) -> Proposal | None:
        return self._proposals.get(proposal)

    def newest(self, proposal: Proposal) -> Proposal:
        """The present form of `proposal`."""
        return self._proposals.get(proposal.id, proposal)

    def facts(self, proposal: str) -> Facts | None:
        """What a proposal stands and falls with; None for one asked for by hand."""
        return self._facts.get(proposal)

    @property
    def all_facts(self) -> dict[str, Facts | None]:
        return dict(self._facts)

    def open_ones(self) -> list[Proposal]:
        return self._where(lambda one: one.state == "open")

    def approved_ones(self) -> list[Proposal]:
        """Those that are approved and not carried out yet."""
        return self._where(lambda one: one.state in _UNDER_WAY)

    def unfinished(self, replica: int) -> list[Proposal]:
        """Those for `replica` that wait for an answer or are being carried out."""
        return self._where(lambda one: one.replica == replica and not one.is_final)

    def under_way(self, replica: int) -> str:
        """Id of the proposal for `replica` that is being carried out, "" if none is."""
        return next((one.id for one in self.approved_ones() if one.replica == replica), "")

    @property
    def is_asking(self) -> bool:
        """Whether a proposal waits for an answer or is being carried out."""
        return any(not one.is_final for one in self._proposals.values())

    def has_open_for_lost_slots(self) -> bool:
        """Whether a replica that does not train waits for an answer."""
        return bool(
            self._where(lambda one: not one.is_final and one.before[one.replica].mode != "training")
        )

    def is_carried_out_by(self, proposal_id: str, plan: GenerationPlan) -> bool:
        """Whether a plan has the proposal's replica in the shape that was approved."""
        proposal = self._proposals.get(proposal_id)
        if proposal is None or proposal.is_final or proposal.chosen is None:
            return False
        found = plan.replicas[proposal.replica]
        live = found.live if found.mode == "training" else ()
        return live == proposal.options[proposal.chosen].shape[proposal.replica]

    def _where(self, wanted: Callable[[Proposal], bool]) -> list[Proposal]:
        return [one for one in self._proposals.values() if wanted(one)]

    # what changes it -------------------------------------------------------------------------

    def recall(
        self, proposals: dict[str, Proposal], facts: dict[str, Facts | None], num_opened: int
    ) -> None:
        """Go on with what an earlier book knew."""
        self._proposals = proposals
        self._facts = {name: facts.get(name) for name in proposals}
        self.num_opened = max(num_opened, len(proposals))

    def enter(self, proposal: Proposal, facts: Facts | None) -> None:
        """Take in a fresh proposal."""
        self._facts[proposal.id] = facts
        self.put(proposal)

    def put(self, proposal: Proposal) -> None:
        """Write a proposal's next form; the oldest final ones go."""
        self._proposals[proposal.id] = proposal
        self._outgoing.put(Publish(proposal=proposal))
        for old in list(self._proposals)[:-KEPT_PROPOSALS]:
            if self._proposals[old].is_final:
                del self._proposals[old], self._facts[old]

    def move(self, proposal: Proposal, state: ProposalState, reason: str) -> None:
        newest = self.newest(proposal)
        self.put(
            msgspec.structs.replace(
                newest, state=state, revision=newest.revision + 1, state_reason=reason
            )
        )

    def bump(self, proposal: Proposal, revision: int) -> None:
        """Write a proposal once more above `revision`, which the store holds against our word."""
        newest = self.newest(proposal)
        self.put(msgspec.structs.replace(newest, revision=max(newest.revision, revision) + 1))

    def lapse(self, why: str) -> None:
        """The generation is over: nothing that was computed for it can be answered any more."""
        for proposal in self.open_ones():
            self.move(proposal, "stale", why)

    def supersede(self, replica: int, why: str) -> None:
        """Make room for another proposal for `replica`."""
        for proposal in self.open_ones():
            if proposal.replica == replica:
                self.move(proposal, "stale", why)

    def interrupted(self, proposal_id: str, cause: str) -> None:
        """The change of an approved proposal did not come to its first step."""
        proposal = self._proposals.get(proposal_id)
        if proposal is not None and not proposal.is_final:
            self.move(proposal, "failed", f"interrupted: {cause}")

    def close_all(self, reason: str) -> None:
        for proposal in self._where(lambda one: not one.is_final):
            self.move(proposal, "stale", f"the run ended: {reason}")
