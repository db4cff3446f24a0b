"""The power side of the run: budgets, what devices allow, feedback on boosts, the batch's slack.

Agents keep caps within budgets, limits and heat by themselves and tell what they set; this desk
says what is wished. When watts cannot hold the pace it shares the batch out anew, unasked: that
moves no state, adds and removes no GPU, changes no sample of any step and can be undone, so waiting
for a person would cost more than the change. It never does so while a proposal is open. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.config import Config
from runtime.control import messages as m
from runtime.control.instructions import Outgoing, Record
from runtime.control.rebalance import Rebalance
from runtime.control.succession import Aim
from runtime.errors import PlanError
from runtime.plan.generation import GenerationPlan, ReplicaPlan
from runtime.plan.lookahead import failures_to_spare
from runtime.power.feedback import Governor
from runtime.power.host import PowerOffer
from runtime.power.port import PowerLimits
from runtime.power.rack_caps import CapBatch
from storage.commands import SetBudget
from storage.records import EventHappened, Severity

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator

BASELINE_STEPS = 20
GOVERNOR = "governor"


class PowerDesk:
    """Power of one run's racks.

    Args:
        config: the run's configuration. run: run id.
    """

    def __init__(self, config: Config, *, run: str, outgoing: Outgoing) -> None:
        self.config = config
        self._configured = config
        self._run = run
        self._outgoing = outgoing
        self.budgets_w: dict[str, float] = {}
        self.offers: dict[str, PowerOffer] = {}
        # Host -> newest batch of caps that was taken, and that is in the journal.
        self._taken: dict[str, tuple[int, int]] = {}
        self.told: dict[str, tuple[int, int]] = {}
        self._caps: dict[str, CapBatch] = {}
        self._governors: dict[int, Governor] = {}
        self._healthy_s: list[float] = []
        self.rebalance = Rebalance()

    # what planners ask -----------------------------------------------------------------------

    @property
    def dead_slot_w(self) -> float:
        return max((offer.dead_slot_w for offer in self.offers.values()), default=0.0)

    @property
    def no_boost(self) -> str:
        """Why no cap can be set, "" when they all can."""
        return next((o.obstacle for o in self.offers.values() if o.obstacle), "")

    def wished_w(self, replica: int) -> tuple[float, ...] | None:
        """Caps that are wished for a replica now, where feedback has moved them off the plan's."""
        governor = self._governors.get(replica)
        return tuple(float(w) for w in governor.wanted_w) if governor is not None else None

    @property
    def hosts(self) -> frozenset[str]:
        """Hosts that have set caps in this run."""
        return frozenset(self._taken) | frozenset(self.told)

    def boost_w(self, plan: ReplicaPlan) -> float:
        """Watts above the normal cap of a replica's most boosted GPU, as set (or as planned); 0.0
        when none is."""
        batch = self._caps.get(plan.rack)
        caps = _by_slot(plan, batch.caps_w) if batch is not None else plan.caps_w
        normal_w = self.config.emulated.normal_cap_w
        return max([0.0, *(caps[slot] - normal_w for slot in plan.live if slot < len(caps))])

    def headroom(self, plan: ReplicaPlan) -> int:
        """How many more failures of a replica's GPUs power can make up for."""
        if self.no_boost:
            return 0
        return failures_to_spare(
            self.config, self.config.cluster.racks[plan.replica], plan.live, self.dead_slot_w
        )

    # what happens ----------------------------------------------------------------------------

    def recall(self, budgets_w: Mapping[str, float], told: Mapping[str, tuple[int, int]]) -> None:
        """Go on with the budgets an earlier controller knew, and the caps it wrote down."""
        self.budgets_w, self.told = dict(budgets_w), dict(told)
        self._adopt()

    def take_over(self, plan: GenerationPlan | None) -> None:
        """Watch the boosts of a generation that an earlier controller formed."""
        if plan is not None and not self._governors:
            self._watch_boosts(plan)

    def hello(self, coordinator: Coordinator, hello: m.AgentHello) -> None:
        """An agent (re)connected: learn what its devices allow, tell it budgets and wishes."""
        if hello.power is not None:
            self.offers[hello.host] = hello.power
            self._adopt()
        if self.budgets_w:
            self._order(coordinator, m.SetDevice(budgets_w=self.budgets_w), hello.host)
        if coordinator.plan is not None:
            cause = f"generation {coordinator.number}"
            self._wish(coordinator, coordinator.plan, cause, "controller", hello.host)

    def generation_published(self, coordinator: Coordinator, plan: GenerationPlan) -> None:
        """Wish the plan's caps, and watch those that are boosted."""
        self._watch_boosts(plan)
        self.rebalance.generation_published()
        cause = f"generation {plan.generation}: {coordinator.led_here.cause}"
        self._wish(coordinator, plan, cause, "controller", None)

    def caps_set(self, coordinator: Coordinator, told: m.CapsSet, now: float) -> None:
        """An agent's word on what it set. It tells again after a gap: each counts once."""
        batch, number = told.batch, (told.epoch, told.number)
        if self._taken.get(told.host, (0, 0)) >= number:
            return
        self._taken[told.host] = number
        self._caps[batch.rack] = batch
        if self.told.get(told.host, (0, 0)) < number:
            self.told[told.host] = number
            self._record_caps(coordinator, batch, now)
        self.rebalance.caps_moved()
        if coordinator.plan is not None:
            for one in coordinator.plan.replicas:
                governor = self._governors.get(one.replica)
                if one.rack == batch.rack and governor is not None:
                    caps_w = _by_slot(one, batch.caps_w)
                    governor.granted(caps_w, anew=batch.by != GOVERNOR)

    def step_committed(
        self, coordinator: Coordinator, plan: GenerationPlan, done: m.StepDone, now: float
    ) -> None:
        """Compare the step's shares: trim boosts, and move samples where watts do not do it."""
        if plan is not coordinator.plan or not done.share_s:
            return
        shares = _shares(plan, done.share_s)
        self._learn(plan, shares)
        if self.config.power.feedback and not self.no_boost:
            for one in plan.replicas:
                governor = self._governors.get(one.replica)
                if governor is not None:
                    reference_s = self._reference_s(plan, shares, one)
                    self._trim(coordinator, one, governor, shares[one.replica], reference_s)
        if self.config.power.reshare:
            self._share_out(coordinator, plan, shares, now)

    def set_budget(self, coordinator: Coordinator, command: SetBudget, now: float) -> str:
        """Carry out an operator's or the facility's budget.

        Raises:
            PlanError: no such rack, or less than its GPUs can be held within.
        """
        racks = {rack.name: rack for rack in self._configured.cluster.racks}
        if command.rack not in racks:
            raise PlanError(f"there is no rack {command.rack!r}; the run has {', '.join(racks)}")
        rack = racks[command.rack]
        limits = self.config.emulated
        full_w = rack.full_budget_w(limits.normal_cap_w, limits.min_cap_w)
        budget_w = command.budget_w or rack.power_budget_w or full_w
        least_w = len(rack.ids) * limits.min_cap_w
        if not least_w <= budget_w < math.inf:
            raise PlanError(
                f"a budget of {command.budget_w:g} W cannot hold the {len(rack.ids)} GPUs of "
                f"{rack.name}: each needs {limits.min_cap_w:g} W; allowed: {least_w:g} W or more "
                "(0: as configured)"
            )
        before_w = self._budget_w(command.rack)
        self.budgets_w[command.rack] = budget_w
        self._adopt()
        self.rebalance.caps_moved()
        words = "cut" if budget_w < before_w else "set"
        why = f": {command.reason}" if command.reason else ""
        message = f"{rack.name}: budget {words} from {before_w:g} W to {budget_w:g} W"
        self._event(
            coordinator, now, "budget_changed", f"{message} by {command.who}{why}", rack.name,
            severity="warning" if budget_w < before_w else "info",
            details={
                "by": command.who, "via": command.via, "reason": command.reason,
                "from_w": before_w, "to_w": budget_w,
            },
        )  # fmt: skip
        order = m.SetDevice(budgets_w={rack.name: budget_w}, by=command.who)
        self._order(coordinator, order, rack.host)
        coordinator.desk.power_changed(coordinator, message, now)
        return message

    # inside ----------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """The configuration with the budgets and device limits that stand."""
        config = self._configured
        racks = tuple(
            msgspec.structs.replace(rack, power_budget_w=self.budgets_w[rack.name])
            if rack.name in self.budgets_w
            else rack
            for rack in config.cluster.racks
        )
        emulated = config.emulated
        if config.cluster.device != "emulated" and self.offers:
            offers = self.offers.values()
            normal_w = min(offer.normal_w for offer in offers)
            emulated = msgspec.structs.replace(
                emulated,
                min_cap_w=min(normal_w, max(offer.min_w for offer in offers)),
                normal_cap_w=normal_w,
                max_cap_w=max(normal_w, min(offer.max_w for offer in offers)),
            )
        self.config = msgspec.structs.replace(
            config,
            cluster=msgspec.structs.replace(config.cluster, racks=racks),
            emulated=emulated,
        )

    def _budget_w(self, rack: str) -> float:
        found = next(one for one in self.config.cluster.racks if one.name == rack)
        limits = self.config.emulated
        return found.power_budget_w or found.full_budget_w(limits.normal_cap_w, limits.min_cap_w)

    def _is_boosted(self, plan: ReplicaPlan) -> bool:
        return any(cap_w > self.config.emulated.normal_cap_w for cap_w in plan.caps_w)

    def _watch_boosts(self, plan: GenerationPlan) -> None:
        self._governors = {
            one.replica: self._governor(one)
            for one in plan.replicas
            if one.mode == "training" and self._is_boosted(one)
        }

    def _governor(self, plan: ReplicaPlan) -> Governor:
        limits = self.config.emulated
        return Governor(
            PowerLimits(
                min_w=limits.min_cap_w, normal_w=limits.normal_cap_w, max_w=limits.max_cap_w
            ),
            [w if s in plan.live else 0.0 for s, w in enumerate(plan.caps_w)],
            floor_w=min(limits.normal_cap_w, *(plan.caps_w[s] for s in plan.live)),
        )

    def _wish(
        self,
        coordinator: Coordinator,
        plan: GenerationPlan,
        cause: str,
        by: str,
        host: str | None,
    ) -> None:
        # Whoever fills no slot idles.
        caps = {gpu: 0.0 for rack in self.config.cluster.racks for gpu in rack.ids}
        for one in plan.replicas:
            wished = self.wished_w(one.replica) or one.caps_w
            alive = frozenset(one.live)
            caps |= {
                gpu: cap_w if slot in alive else 0.0
                for slot, (gpu, cap_w) in enumerate(zip(one.gpus, wished, strict=True))
            }
        self._order(coordinator, m.SetDevice(caps_w=caps, cause=cause, by=by), host)

    def _trim(
        self,
        coordinator: Coordinator,
        plan: ReplicaPlan,
        governor: Governor,
        share_s: npt.NDArray[np.float64],
        reference_s: float,
    ) -> None:
        before = governor.lag
        wanted = governor.observe(share_s, reference_s)
        if wanted is None:
            return
        lag = governor.lag
        words = f"{lag:+.1%} against the healthy pace" if lag != before else "keeping pace"
        host = self.config.cluster.racks[plan.replica].host
        caps = {plan.gpus[slot]: float(wanted[slot]) for slot in plan.live}
        cause = f"feedback: its slowest slot took {words}"
        self._order(coordinator, m.SetDevice(caps_w=caps, cause=cause, by=GOVERNOR), host)

    def _limited(self, rack: str) -> bool:
        batch = self._caps.get(rack)
        return batch is not None and bool(batch.limited_by)

    def _restrained(self, plan: ReplicaPlan) -> bool:
        """Watts keep this replica from the pace it should have."""
        governor = self._governors.get(plan.replica)
        return self._limited(plan.rack) or (governor is not None and governor.short)

    def _learn(self, plan: GenerationPlan, shares: Mapping[int, npt.NDArray[np.float64]]) -> None:
        """Keep what a healthy step's longest share is, while the run is healthy."""
        whole = all(
            one.mode == "training" and one.degree == len(one.gpus) and not self._limited(one.rack)
            for one in plan.replicas
        )
        if whole:
            self._healthy_s.append(max(float(share.max()) for share in shares.values()))
            del self._healthy_s[:-BASELINE_STEPS]

    def _reference_s(
        self,
        plan: GenerationPlan,
        shares: Mapping[int, npt.NDArray[np.float64]],
        subject: ReplicaPlan,
    ) -> float:
        """The share that `subject` should keep pace with; 0.0 when nobody knows.

        That of the whole replicas at their normal cap, which would wait for it; else the healthy
        run's, or the device model's, for as many samples as it takes: more of them are no lag.
        """
        whole = [
            float(shares[one.replica].max())
            for one in plan.replicas
            if one.mode == "training"
            and one.degree == len(one.gpus)
            and one.replica not in self._governors
            and not self._limited(one.rack)
        ]
        if whole:
            return max(whole)
        emulated = self.config.cluster.device == "emulated"
        healthy_s = float(np.median(self._healthy_s)) if self._healthy_s else 0.0
        if not healthy_s and emulated:
            healthy_s = self.config.emulated.step_s
        return healthy_s * subject.num_samples * len(plan.replicas) / plan.global_batch

    def _share_out(
        self,
        coordinator: Coordinator,
        plan: GenerationPlan,
        shares: Mapping[int, npt.NDArray[np.float64]],
        now: float,
    ) -> None:
        training = [one for one in plan.replicas if one.mode == "training"]
        limited = [one.rack for one in training if self._restrained(one)]
        words = [f"power limits {', '.join(limited)}"] if limited else []
        words += filter(None, map(coordinator.examiner.slow_in, training))
        samples = {one.replica: one.num_samples for one in training}
        longest = {one.replica: float(shares[one.replica].max()) for one in training}
        found = self.rebalance.observe(samples, longest, restrained=bool(words), now=now)
        busy = coordinator.phase != "training" or not coordinator.takes_decisions
        if found is None or busy or coordinator.desk.book.is_asking:
            return
        why = "; ".join(words) or "nothing holds a replica back any more"
        cause = f"the batch is shared out anew: {why}"
        self._event(
            coordinator, now, "batch_reshared",
            f"{cause}; a step goes from {found.before_s:.2f} s to {found.after_s:.2f} s",
            None,
            details={
                "by": GOVERNOR, "before": list(samples.values()), "after": list(found.samples),
                "before_s": found.before_s, "after_s": found.after_s,
            },
        )  # fmt: skip
        self.rebalance.applied(now, restrained=bool(words))
        new = dict(zip(samples, found.samples, strict=True))
        aims = [
            Aim(
                replica=one.replica,
                mode=one.mode,
                live=one.live,
                num_samples=new.get(one.replica, 0),
                caps_w=self.wished_w(one.replica) or one.caps_w,
            )
            for one in plan.replicas
        ]
        coordinator.change_shape(aims, cause=cause, proposal="", now=now)

    # records ---------------------------------------------------------------------------------

    def _record_caps(self, coordinator: Coordinator, batch: CapBatch, now: float) -> None:
        limited = f", limited by {batch.limited_by}" if batch.limited_by else ""
        parts = [_in_words(batch)] if batch.slots else []
        if batch.refused:
            slot, why = next(iter(sorted(batch.refused.items())))
            parts.append(f"{len(batch.refused)} refused (slot {slot}: {why})")
        what = "; ".join(parts) or ("held back" if batch.limited_by else "no longer held back")
        self._event(
            coordinator, min(now, batch.at), "cap_changed",
            f"{batch.rack}: {what} ({batch.cause}, by {batch.by}); "
            f"{batch.sum_w:.0f} of {batch.budget_w:.0f} W{limited}",
            batch.rack,
            severity="warning" if batch.refused or batch.limited_by else "info",
            details={
                "by": batch.by, "cause": batch.cause, "slots": list(batch.slots),
                "from_w": list(batch.from_w), "to_w": list(batch.to_w),
                "refused": {str(slot): why for slot, why in batch.refused.items()},
                "sum_w": batch.sum_w, "budget_w": batch.budget_w, "limited_by": batch.limited_by,
            },
        )  # fmt: skip

    def _event(
        self,
        coordinator: Coordinator,
        at: float,
        kind: str,
        message: str,
        rack: str | None,
        *,
        severity: Severity = "info",
        details: dict[str, Any],
    ) -> None:
        names = [one.name for one in self.config.cluster.racks]
        entry = EventHappened(
            seq=0, at=at, run=self._run, kind=kind, severity=severity, message=message,
            generation=coordinator.number, rack=rack,
            replica=names.index(rack) if rack in names else None, details=details,
        )  # fmt: skip
        self._outgoing.put(Record(entry=entry))

    @staticmethod
    def _order(coordinator: Coordinator, message: m.SetDevice, host: str | None) -> None:
        coordinator.order(message, host)


def _by_slot(plan: ReplicaPlan, caps_w: Sequence[float]) -> tuple[float, ...]:
    """Caps of a rack by place as those of the GPUs in a replica's slots."""
    places = [int(gpu.rpartition("/")[2]) for gpu in plan.gpus]
    return tuple(caps_w[place] if place < len(caps_w) else 0.0 for place in places)


def _shares(plan: GenerationPlan, share_s: tuple[float, ...]) -> dict[int, npt.NDArray[np.float64]]:
    """Per training replica the share of every slot, 0.0 for dead ones."""
    found, rank = {}, 0
    for one in plan.replicas:
        if one.mode == "out":
            continue
        own = share_s[rank : rank + one.degree]
        rank += one.degree
        if one.mode == "training" and len(own) == one.degree:
            shares = np.zeros(len(one.gpus))
            shares[list(one.live)] = own
            found[one.replica] = shares
    return found


def _in_words(batch: CapBatch) -> str:
    """What changed, grouped: `7 caps from 1000 W to 1142 W`."""
    groups: dict[tuple[int, int], int] = {}
    for before_w, after_w in zip(batch.from_w, batch.to_w, strict=True):
        key = (round(before_w), round(after_w))
        groups[key] = groups.get(key, 0) + 1
    if len(groups) > 3:
        low, high = min(batch.to_w), max(batch.to_w)
        return f"{len(batch.slots)} caps set to {low:.0f} to {high:.0f} W"
    return ", ".join(
        f"{count} {'cap' if count == 1 else 'caps'} from {before_w} W to {after_w} W"
        for (before_w, after_w), count in groups.items()
    )
