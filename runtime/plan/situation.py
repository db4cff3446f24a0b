"""What the planner is told, and what the controller is told in return: plain values.

A `Situation` is the run as it stands; a `ReplicaTarget` is what one replica shall become. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runtime.config import Config, RackConfig
from runtime.errors import PlanError
from runtime.layout.fractional import layout_for
from runtime.plan.cost import Calibration, CostModel, ReplicaLoad
from runtime.plan.generation import NO_HOLDER, Holders
from storage.records import ReplicaMode


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner charges for changes, in seconds; measured where the run has measured.

    horizon_s: how long a choice is taken to stand; 3 h is the shortest repair in the NTP paper's
        trace (a software failure).
    """

    reconfigure_s: float = 2.0
    restart_s: float = 60.0
    horizon_s: float = 10_800.0


class ReplicaSituation(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as it stands.

    home/holders: its home layout, and the current one (holes where nobody holds a unit, or still
        naming slots that are dead). live: slots that hold its state now. returned: slots that are
        back but hold nothing yet; all others are dead.
    caps_w, slowness: per slot; slowness is measured, 1.0 is none, () means none anywhere.
    spares: GPUs of its rack that live and fill no slot.
    left_out: live slots that every option but carrying on leaves out. unfit: they are about to
        fail, so carrying on is no choice.
    slow: live or returned slots that an option leaves out where that promises more.
    """

    replica: int
    rack: str
    mode: ReplicaMode
    gpus: tuple[str, ...]
    home: Holders
    holders: Holders
    live: tuple[int, ...]
    caps_w: tuple[float, ...]
    returned: tuple[int, ...] = ()
    slowness: tuple[float, ...] = ()
    left_out: tuple[int, ...] = ()
    unfit: bool = False
    slow: tuple[int, ...] = ()
    spares: tuple[str, ...] = ()

    @property
    def num_slots(self) -> int:
        return len(self.gpus)

    @property
    def dead(self) -> tuple[int, ...]:
        there = frozenset(self.live) | frozenset(self.returned)
        return tuple(slot for slot in range(self.num_slots) if slot not in there)

    @property
    def usable(self) -> tuple[int, ...]:
        """Slots that could train: live or returned, and fit."""
        return tuple(sorted({*self.live, *self.returned} - set(self.left_out)))

    @property
    def keeping_slow(self) -> ReplicaSituation:
        """The replica with its slow slots as good as any."""
        return msgspec.structs.replace(self, slow=())

    @property
    def leaving_slow(self) -> ReplicaSituation:
        """The replica whose slow slots are to be left out."""
        return msgspec.structs.replace(
            self,
            left_out=tuple(sorted({*self.left_out, *self.slow} & set(self.live))),
            returned=tuple(slot for slot in self.returned if slot not in self.slow),
            slow=(),
        )

    @property
    def drained(self) -> ReplicaSituation:
        """The replica once the slots to be left out are gone: they count as dead."""
        live = tuple(slot for slot in self.live if slot not in self.left_out)
        return msgspec.structs.replace(self, live=live, left_out=(), unfit=False)

    @property
    def replaced(self) -> ReplicaSituation:
        """The replica once its spares have taken dead slots' places, as far as they go."""
        filled = dict(zip(self.dead, self.spares, strict=False))
        gpus = tuple(filled.get(slot, gpu) for slot, gpu in enumerate(self.gpus))
        slowness = tuple(1.0 if slot in filled else one for slot, one in enumerate(self.slowness))
        return msgspec.structs.replace(
            self,
            gpus=gpus,
            slowness=slowness,
            returned=tuple(sorted({*self.returned, *filled})),
            spares=self.spares[len(filled) :],
        )

    @property
    def intact(self) -> bool:
        """Every unit has a live holder: it can train as it is."""
        alive = frozenset(self.live)
        return bool(alive) and all(
            slot in alive for slots in self.holders.values() for slot in slots
        )

    @property
    def trains(self) -> bool:
        """It is in training and no failure has just broken it."""
        return self.mode == "training" and self.intact

    @property
    def shape(self) -> tuple[int, ...]:
        """Live slots that train; () when it is left out."""
        return self.live if self.trains else ()


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run as the planner sees it. replicas[i] is replica i.

    config: with the rack budgets and device limits that stand now. dead_slot_w: what the GPU of a
    dead slot keeps of its rack's budget.
    no_restart: why the run cannot be restarted from a checkpoint, "" when it can.
    no_boost: why no cap can be raised at all (no permission, read-only), "" when it can.
    """

    config: Config
    replicas: tuple[ReplicaSituation, ...]
    calibration: Calibration = Calibration()
    costs: Costs = Costs()
    dead_slot_w: float = 0.0
    no_boost: str = ""
    no_restart: str = ""

    @property
    def model(self) -> CostModel:
        return CostModel(config=self.config, calibration=self.calibration)

    @property
    def normal_cap_w(self) -> float:
        return self.config.emulated.normal_cap_w

    def rack(self, replica: ReplicaSituation) -> RackConfig:
        """The rack that carries `replica`.

        Raises:
            PlanError: the config has no rack of that name.
        """
        for rack in self.config.cluster.racks:
            if rack.name == replica.rack:
                return rack
        raise PlanError(f"replica {replica.replica} is in rack {replica.rack!r}, not in the config")

    def layout(self, replica: ReplicaSituation, slots: Sequence[int]) -> Holders:
        """What `replica` holds where once it trains on `slots`."""
        config, home = self.config, replica.home
        num_replicas = len(config.cluster.racks)
        return layout_for(config.model, config.train, num_replicas, home, replica.holders, slots)

    def load(self, replica: ReplicaSituation) -> ReplicaLoad:
        """`replica` as it stands, for the cost model; without samples yet."""
        return ReplicaLoad(
            holders=replica.holders,
            live=replica.live,
            caps_w=replica.caps_w,
            host=self.rack(replica).host,
            slowness=replica.slowness,
        )


class ReplicaTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica shall be in the next generation; fields as in `ReplicaPlan`."""

    replica: int
    mode: ReplicaMode
    live: tuple[int, ...]
    holders: Holders
    num_samples: int
    caps_w: tuple[float, ...]

    @property
    def has_holes(self) -> bool:
        return any(NO_HOLDER in slots for slots in self.holders.values())
