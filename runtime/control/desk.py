"""The desk: opens proposals when the shape is not what it could be, takes answers, follows up.

A proposal names the generation it was computed for and lapses with it. It is recomputed, not
carried over, whenever the facts change. Decisions come from people or from policy and count once.
The planner says what an option would bring; the coordinator carries it out. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from runtime.config import Config
from runtime.control.book import Book
from runtime.control.fleet import Facts
from runtime.control.followup import Followup
from runtime.control.instructions import Outgoing, Record
from runtime.control.intake import Intake
from runtime.control.memory import DeskMemory
from runtime.control.messages import StepDone
from runtime.control.policy_desk import PolicyDesk
from runtime.control.situations import aim_for, situation_of
from runtime.control.standing import facts_of, some_replica_trains, standing_words
from runtime.control.succession import Aim
from runtime.errors import PlanError
from runtime.plan.planner import Comparison, compare, leave_out, targets
from runtime.plan.situation import Situation
from storage.records import (
    DecisionMade,
    EventHappened,
    Option,
    Proposal,
)

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator

KEPT_EVIDENCE = 20
LOOK_EVERY_S = 10.0
# Evidence that is older than this part of what is allowed when a proposal opens is looked at once
# more, and that is evidence too.
CONFIRM_FROM = 0.1


class Desk:
    """Keeps the proposals of one run."""

    def __init__(self, config: Config, *, run: str, outgoing: Outgoing) -> None:
        self._run = run
        self._outgoing = outgoing
        self.book = Book(outgoing)
        self.policy = PolicyDesk(config.policy, run=run, outgoing=outgoing)
        self.intake = Intake(run=run, outgoing=outgoing)
        self._num_slots = [rack.gpus for rack in config.cluster.racks]
        self._dismissed: set[Facts] = set()
        # What will have been dismissed once the change under way is through.
        self._after_change: set[Facts] = set()
        self._evidence: dict[int, list[tuple[float, str]]] = {}
        # Why a replica cannot be planned for, told once.
        self._unplanned: dict[int, tuple[Facts, str]] = {}
        self._looked_at = 0.0
        self.followup = Followup(config)

    # what the coordinator asks ---------------------------------------------------------------

    def fit_aims(self, coordinator: Coordinator, now: float) -> list[Aim]:
        """The shape to go to now: the one decided on if any, else the survivors'.

        Raises:
            PlanError: no replica has a live slot.
        """
        aimed = coordinator.change.planned and self.can_go_to(coordinator, coordinator.aims)
        anew = coordinator.generations.previous is None and not coordinator.change.proposal
        if (coordinator.change.proposal or aimed) and not anew:
            return coordinator.aims
        situation = self.situation(coordinator)
        aims = [aim_for(target) for target in leave_out(situation)]
        if not any(replica.trains for replica in situation.replicas):
            self._event(
                "replica_reshaped_by_policy",
                "No replica was whole: every replica with live slots shrank to them at once.",
                coordinator.number,
                now,
            )
        return aims

    def can_go_to(self, coordinator: Coordinator, aims: Sequence[Aim]) -> bool:
        """Whether every slot of the shape `aims` has a living worker."""
        return all(set(aim.live) <= set(coordinator.fleet.alive(aim.replica)) for aim in aims)

    def situation(
        self, coordinator: Coordinator, left_out: Mapping[int, tuple[int, ...]] | None = None
    ) -> Situation:
        """The run as the planner sees it; `left_out` as in `situation_of`."""
        return situation_of(coordinator, self.followup, left_out)

    def _aims_of(self, coordinator: Coordinator, proposal: Proposal, option: Option) -> list[Aim]:
        """The shape that `option` of `proposal` goes to.

        Raises:
            PlanError: it cannot be done any more.
        """
        left_out = None
        if option.gpus:
            coordinator.fleet.seat(proposal.replica, option.gpus)
        if proposal.undoes:
            alive = coordinator.fleet.alive(proposal.replica)
            shape = option.shape[proposal.replica]
            left_out = {proposal.replica: tuple(slot for slot in alive if slot not in shape)}
        situation = self.situation(coordinator, left_out)
        return [aim_for(target) for target in targets(situation, option)]

    def note(self, replica: int, at: float, text: str) -> None:
        """Keep evidence for the replica's next proposal."""
        found = self._evidence.setdefault(replica, [])
        found.append((at, text))
        del found[:-KEPT_EVIDENCE]

    def memory(self) -> DeskMemory:
        """What to write down beside the proposals, which are in the journal."""
        return DeskMemory(
            facts=self.book.all_facts,
            dismissed=tuple(sorted(self._dismissed | self._after_change)),
            opened=self.book.num_opened,
            evidence={replica: list(found) for replica, found in self._evidence.items()},
        )

    def recall(self, memory: DeskMemory, proposals: dict[str, Proposal]) -> None:
        """Go on with what an earlier desk knew."""
        self.book.recall(proposals, memory.facts, memory.opened)
        self._dismissed = set(memory.dismissed)
        self._evidence = {replica: list(found) for replica, found in memory.evidence.items()}

    def carry_out_approved(self, coordinator: Coordinator, now: float) -> None:
        """Go on with an approved proposal that a restart interrupted before its change began."""
        for proposal in self.book.approved_ones():
            if proposal.id == coordinator.change.proposal:
                continue
            option = proposal.options[proposal.chosen or 0]
            try:
                aims = self._aims_of(coordinator, proposal, option)
            except PlanError as error:
                self.book.move(proposal, "failed", str(error))
                continue
            coordinator.change_shape(
                aims,
                step_s=option.step_s,
                cause=f"{option.title} (approved by {proposal.decided_by})",
                proposal=proposal.id,
                now=now,
                restart=option.kind == "restart",
            )

    def power_changed(self, coordinator: Coordinator, why: str, now: float) -> None:
        """A rack's budget is another one: what was planned with the old one lapses."""
        self.book.lapse(why)
        self.refresh(coordinator, now)

    def refresh(self, coordinator: Coordinator, now: float) -> None:
        """Let proposals lapse whose facts are gone, and open those that are due."""
        if coordinator.plan is None or not coordinator.takes_decisions:
            return
        self._looked_at = now
        facts = {r.replica: facts_of(coordinator, r.replica) for r in coordinator.plan.replicas}
        for proposal in self.book.open_ones():
            about = self.book.facts(proposal.id)
            if proposal.generation != coordinator.number:
                why = f"generation {proposal.generation} ended: {coordinator.change.cause}"
                self.book.move(proposal, "stale", why)
            elif about is not None and about != facts[proposal.replica]:
                self.book.move(proposal, "stale", "the replica's GPUs changed since")
        # What was dismissed may be asked again once the facts changed, even if they change back.
        self._dismissed |= self._after_change
        self._after_change = set()
        self._dismissed &= set(facts.values())
        for replica, about in facts.items():
            if self._is_due(about) and not self.book.unfinished(replica):
                self._open(coordinator, replica, about, now)

    def tick(self, coordinator: Coordinator, now: float) -> None:
        """Expire proposals and carry out what policy answers."""
        if self.policy.has_turned(now):
            self._rule_anew(coordinator, now)
        if now - self._looked_at >= LOOK_EVERY_S:
            # What did not pay may do by now: it is measured all the time.
            self.refresh(coordinator, now)
        for proposal in self.book.open_ones():
            if now >= proposal.expires_at:
                standing_s = proposal.expires_at - proposal.created_at
                why = f"nobody answered within {standing_s:g} s"
                self.book.move(proposal, "expired", why)
                self.refresh(coordinator, now)
                continue
            # An answer to one of them may have ended the generation of the others.
            is_open = self.book.newest(proposal).state == "open"
            stands = is_open and coordinator.takes_decisions
            if stands and proposal.auto_at is not None and now >= proposal.auto_at:
                self._decide_by_policy(coordinator, proposal, now)

    def _rule_anew(self, coordinator: Coordinator, now: float) -> None:
        """Another policy holds, or another hour: what waits is answered by it."""
        for proposal in self.book.open_ones():
            if self.policy.observes(proposal.kind, now):
                self.book.move(proposal, "stale", "the policy has nothing proposed any more")
                continue
            ruled = self.policy.rule(proposal, now, others_train=some_replica_trains(coordinator))
            if ruled != proposal:
                self.book.put(msgspec.structs.replace(ruled, revision=proposal.revision + 1))
        self.refresh(coordinator, now)

    def look_again(
        self, coordinator: Coordinator, proposal: Proposal, why: str, now: float
    ) -> None:
        """Let `proposal` lapse and plan the same anew, with what is seen now."""
        self.book.move(proposal, "stale", why)
        if self.book.facts(proposal.id) is not None:
            self.refresh(coordinator, now)
            return
        try:
            situation = self.situation(coordinator)
            comparison = compare(situation, proposal.replica, wanted=proposal.kind)
        except PlanError as error:
            self._event("planning_failed", str(error), coordinator.number, now)
            return
        if comparison.choice.feasible:
            self.open(
                coordinator, comparison, now, facts=None, cause=proposal.cause,
                asked_by=proposal.asked_by,
            )  # fmt: skip

    def record(self, decision: DecisionMade) -> None:
        self._outgoing.put(Record(entry=decision))

    def _decide_by_policy(self, coordinator: Coordinator, proposal: Proposal, now: float) -> None:
        decision = self._policy_decision(proposal, now)
        try:
            self.decide(coordinator, proposal, decision, revision=proposal.revision + 1)
        except PlanError as error:
            self._event("planning_failed", str(error), coordinator.number, now)

    def _policy_decision(self, proposal: Proposal, now: float) -> DecisionMade:
        return DecisionMade(
            seq=0,
            at=now,
            run=self._run,
            id=f"policy-{proposal.id}",
            proposal=proposal.id,
            generation=proposal.generation,
            verdict="approved",
            option=proposal.recommended,
            who="policy",
            via="policy",
            reason=proposal.ruling,
        )

    def reshape_at_once(
        self, coordinator: Coordinator, now: float
    ) -> tuple[list[Aim], Proposal] | None:
        """Where policy answers at once: what to make of a replica that just lost slots.

        It then need not stand by for a step. None: it has to, as more than one is broken, no other
        trains whole, or somebody is to be asked.
        """
        assert coordinator.plan is not None
        trained = [one for one in coordinator.plan.replicas if one.mode == "training"]
        broken = [
            one.replica
            for one in trained
            if not set(one.live) <= set(coordinator.fleet.alive(one.replica))
        ]
        if len(broken) != 1 or len(trained) == 1 or self.book.unfinished(broken[0]):
            return None
        about = facts_of(coordinator, broken[0])
        try:
            situation = self.situation(coordinator)
            comparison = compare(situation, broken[0])
            option = comparison.choice
            if option.kind not in ("shrink", "shrink_boost") or not self._is_due(about):
                return None
            aims = [aim_for(target) for target in targets(situation, option)]
        except PlanError:
            return None  # It is left out, and planned for again then.
        draft = self._draft(coordinator, comparison, now)
        if draft.auto_at is None or draft.auto_at > now:
            return None
        proposal = self.open(coordinator, comparison, now, facts=about)
        decision = self._policy_decision(proposal, now)
        self.record(decision)
        self.book.put(_answered(proposal, decision, proposal.revision + 1))
        self.book.move(proposal, "applying", "in the generation that the failure makes necessary")
        return aims, proposal

    # proposals -------------------------------------------------------------------------------

    def _is_due(self, about: Facts) -> bool:
        _, mode, live, alive, left_out, spares = about
        if about in self._dismissed or not alive:
            return False
        # Whoever lost slots can be whole again where there are spares.
        short = bool(spares) and len(alive) < self._num_slots[about[0]]
        return mode != "training" or live != alive or bool(left_out) or short

    def _open(self, coordinator: Coordinator, replica: int, about: Facts, now: float) -> None:
        try:
            comparison = compare(self.situation(coordinator), replica)
        except PlanError as error:
            if self._unplanned.get(replica) != (about, str(error)):
                self._unplanned[replica] = about, str(error)
                self._event("planning_failed", str(error), coordinator.number, now)
            return
        self._unplanned.pop(replica, None)
        choice = comparison.choice
        if choice.kind == "carry_on" or not choice.feasible:
            return
        if not self.policy.observes(choice.kind, now):
            self.open(coordinator, comparison, now, facts=about)

    def open(
        self,
        coordinator: Coordinator,
        comparison: Comparison,
        now: float,
        *,
        facts: Facts | None,
        cause: str = "",
        asked_by: str = "",
        undoes: str = "",
    ) -> Proposal:
        """Open a proposal. facts: what it stands and falls with; None for one asked for by hand."""
        proposal = self._draft(coordinator, comparison, now, cause, asked_by, undoes)
        self.book.num_opened += 1
        self.book.enter(proposal, facts)
        return proposal

    def _draft(
        self,
        coordinator: Coordinator,
        comparison: Comparison,
        now: float,
        cause: str = "",
        asked_by: str = "",
        undoes: str = "",
    ) -> Proposal:
        """The next proposal, with what policy rules of it; not in the book yet."""
        assert coordinator.plan is not None
        replica = comparison.replica
        evidence = self._evidence.get(replica, [])
        if (
            not evidence
            or now - evidence[-1][0] > CONFIRM_FROM * self.policy.policy.evidence_max_age_s
        ):
            evidence = [*evidence, (now, f"seen now: {standing_words(coordinator, replica)}")]
        proposal = Proposal(
            id=f"p{self.book.num_opened + 1}",
            run=self._run,
            generation=coordinator.number,
            revision=1,
            created_at=now,
            expires_at=now,
            replica=replica,
            kind=comparison.choice.kind,
            cause=cause or self._cause(coordinator, replica),
            before=coordinator.progress.replica_states(coordinator.plan),
            options=comparison.options,
            recommended=comparison.recommended,
            evidence=tuple(evidence),
            asked_by=asked_by,
            undoes=undoes,
        )
        return self.policy.rule(proposal, now, others_train=some_replica_trains(coordinator))

    def _cause(self, coordinator: Coordinator, replica: int) -> str:
        evidence = self._evidence.get(replica, [])
        return evidence[-1][1] if evidence else coordinator.change.cause

    def decide(
        self,
        coordinator: Coordinator,
        proposal: Proposal,
        decision: DecisionMade,
        *,
        revision: int,
    ) -> None:
        """Carry out a valid answer to an open proposal; `revision` is that of the answered form.

        Raises:
            PlanError: what was approved cannot be done any more; the proposal is stale.
        """
        aims: list[Aim] = []
        if decision.option is not None:
            option = proposal.options[decision.option]
            try:
                aims = self._aims_of(coordinator, proposal, option)
            except PlanError as error:
                self.book.move(proposal, "stale", str(error))
                self.refresh(coordinator, decision.at)
                raise
        self.record(decision)
        answered = _answered(proposal, decision, revision)
        self.book.put(answered)
        about = self.book.facts(proposal.id)
        if decision.option is None:
            self._dismiss(about)
            self.refresh(coordinator, decision.at)
            return
        if option.kind in ("carry_on", "drop"):
            self._dismiss(about or facts_of(coordinator, proposal.replica))
        if aims == coordinator.aims and option.kind not in ("replace", "restart"):
            self.book.move(answered, "applied", "nothing had to change")
            return
        if option.kind in ("drop", "shrink", "shrink_boost") or proposal.undoes:
            aim = aims[proposal.replica]
            alive, left_out, spares = facts_of(coordinator, proposal.replica)[3:]
            about = (proposal.replica, aim.mode, aim.live, alive, left_out, spares)
            self._after_change.add(about)
        self.book.move(answered, "applying", "waiting for the step boundary")
        coordinator.change_shape(
            aims,
            step_s=option.step_s,
            cause=f"{option.title} (approved by {decision.who})",
            proposal=proposal.id,
            now=decision.at,
            restart=option.kind == "restart",
        )

    def _dismiss(self, about: Facts | None) -> None:
        if about is not None:
            self._dismissed.add(about)

    def formed(self, coordinator: Coordinator, at: float) -> None:
        """A generation committed its first step: what was decided for it is applied."""
        proposal = self.book.get(coordinator.led_here.proposal)
        if proposal is None or proposal.is_final:
            return
        outcome = self.followup.begin(proposal, coordinator.number, at)
        self.book.put(
            msgspec.structs.replace(
                proposal,
                state="applied",
                revision=proposal.revision + 1,
                state_reason="the runtime has committed a step in the new shape",
                outcome=outcome,
            )
        )

    def step_committed(self, coordinator: Coordinator, done: StepDone) -> None:
        """Measure what an applied proposal brought, beside what was predicted."""
        found = self.followup.observe(coordinator.progress, done)
        proposal = self.book.get(found[0]) if found else None
        if found and proposal is not None:
            self.book.put(
                msgspec.structs.replace(proposal, outcome=found[1], revision=proposal.revision + 1)
            )

    def _event(self, kind: str, message: str, generation: int, now: float) -> None:
        self._outgoing.put(
            Record(
                entry=EventHappened(
                    seq=0,
                    at=now,
                    run=self._run,
                    kind=kind,
                    severity="warning",
                    message=message,
                    generation=generation,
                )
            )
        )


def _answered(proposal: Proposal, decision: DecisionMade, revision: int) -> Proposal:
    return msgspec.structs.replace(
        proposal,
        state="rejected" if decision.option is None else "approved",
        revision=revision,
        decided_by=" and ".join(one.who for one in proposal.approvals) or decision.who,
        decided_at=decision.at,
        chosen=decision.option,
        state_reason=decision.reason,
    )
