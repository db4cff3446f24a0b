"""The cost model: what a step takes in a given shape, and how that compares to the healthy run.

Predicts with the emulated device's own pacing, corrected by what the run measured (`Calibration`).
Pure: measurements come in as values.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from runtime.config import Config, ModelConfig
from runtime.errors import PlanError
from runtime.layout.takeover import home_holders
from runtime.layout.work import work_by_slot
from runtime.plan.batch import apportion
from runtime.plan.generation import Holders
from runtime.power.curve import curve_of
from runtime.power.emulated import share_s, speed_at


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What measured steps add to the emulated pace.

    overhead_s: part of every step outside the replicas' own shares: synchronisation, optimizer,
        commit.
    host_s_per_sample: seconds the host's processors need per sample of all replicas they carry. The
        emulated wait hides it until it is longer than the share. 0: not known, no floor.
    base_step_s: healthy share of a step where the config gives none (real GPUs); 0: not measured.
    """

    overhead_s: float = 0.0
    host_s_per_sample: float = 0.0
    base_step_s: float = 0.0


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as the cost model sees it. Per slot: cap in watts, slowness (() means none).

    live: slots that compute. num_samples: its samples of a step, 0 when it is left out.
    """

    holders: Holders
    live: tuple[int, ...]
    caps_w: tuple[float, ...]
    host: str = "localhost"
    slowness: tuple[float, ...] = ()
    num_samples: int = 0


class StepPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted step. replica_step_s: every replica's own share, without waiting for the others.

    goodput: token goodput against the fully healthy run, at most 1 (0 when nothing trains).
    """

    step_s: float
    replica_step_s: tuple[float, ...]
    tokens_per_s: float
    goodput: float


class StepObserved(msgspec.Struct, frozen=True, kw_only=True):
    """One committed step as measured. Per replica: own share (slowest slot), of it busy before the
    emulated wait (() when not known), and samples."""

    step_s: float
    samples: tuple[int, ...]
    replica_step_s: tuple[float, ...]
    compute_s: tuple[float, ...] = ()


@lru_cache(maxsize=1024)
def _work(
    model: ModelConfig,
    seq_len: int,
    layout: tuple[tuple[str, tuple[int, ...]], ...],
    num_slots: int,
) -> tuple[float, ...]:
    """`work_by_slot`, kept: every option of a comparison asks for the same layouts again."""
    return work_by_slot(model, seq_len, dict(layout), num_slots)


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """Predicts steps of one run."""

    config: Config
    calibration: Calibration = Calibration()

    @property
    def healthy_samples(self) -> int:
        """Samples of the busiest replica in the healthy run: what `step_s` is the time of."""
        return -(-self.config.train.global_batch // len(self.config.cluster.racks))

    @property
    def base_step_s(self) -> float:
        """Healthy share of a step: configured if emulated, else measured, else a nominal second.

        The nominal second keeps ratios right while no number is known; an emulated run that is as
        fast as its host has no share, only the host's floor.
        """
        emulated, known = self.config.emulated, self.calibration
        if self.config.cluster.device == "emulated":
            if emulated.step_s > 0.0 or known.host_s_per_sample > 0.0:
                return emulated.step_s
            return 1.0
        return known.base_step_s or 1.0

    def loads_by_slot(self, load: ReplicaLoad) -> tuple[float, ...]:
        """Work times slowness per slot, relative to a healthy slot; 0.0 for slots not live."""
        num_slots = len(load.caps_w)
        train = self.config.train
        layout = tuple(load.holders.items())
        work = _work(self.config.model, train.seq_len, layout, num_slots)
        slowness = load.slowness or (1.0,) * num_slots
        alive = frozenset(load.live)
        return tuple(
            work[slot] * slowness[slot] if slot in alive else 0.0 for slot in range(num_slots)
        )

    def sample_s(self, load: ReplicaLoad) -> float:
        """Seconds per sample of the replica's slowest slot; inf when nothing is live."""
        if not load.live:
            return math.inf
        emulated = msgspec.structs.replace(self.config.emulated, step_s=self.base_step_s)
        loads, curve = self.loads_by_slot(load), curve_of(self.config.power.curve)
        return max(
            share_s(
                emulated,
                loads[slot],
                1,
                self.healthy_samples,
                speed_at(emulated, load.caps_w[slot], curve=curve),
            )
            for slot in load.live
        )

    def speed(self, load: ReplicaLoad) -> float:
        """Whole samples' pace for the batch plan, in healthy replicas; 0.0 when nothing is live.

        Without any emulated share (as fast as the host) every live replica counts the same.
        """
        if not load.live:
            return 0.0
        sample_s = self.sample_s(load)
        if sample_s == 0.0:
            return 1.0
        # Rounded, so that noise of the last bits never decides who takes the odd sample.
        return round(self.base_step_s / self.healthy_samples / sample_s, 9)

    def shared_out(self, loads: Sequence[ReplicaLoad], trains: Sequence[bool]) -> list[ReplicaLoad]:
        """`loads` with the global batch apportioned over those that train.

        Raises:
            PlanError: none trains.
        """
        speeds = [self.speed(load) if on else 0.0 for load, on in zip(loads, trains, strict=True)]
        samples = apportion(self.config.train.global_batch, speeds)
        return [
            msgspec.structs.replace(load, num_samples=count)
            for load, count in zip(loads, samples, strict=True)
        ]

    def predict(self, loads: Sequence[ReplicaLoad]) -> StepPrediction:
        """Predict the step of a run whose replicas carry `loads`.

        A replica takes its emulated share or, when longer, the host's time for all samples that its
        host carries (its processors are shared, so it hardly matters whose samples they are). A
        step takes the slowest replica plus the measured overhead.
        """
        return self._against(loads, self.ideal_step_s)

    @property
    def ideal_step_s(self) -> float:
        """Step time of the fully healthy run on the same hosts: the baseline of goodput."""
        return max(self._replica_step_s(self.healthy_loads()), default=0.0) + (
            self.calibration.overhead_s
        )

    def healthy_loads(self) -> list[ReplicaLoad]:
        """Every replica whole, at the normal cap, with its part of the batch."""
        sizes = {rack.gpus for rack in self.config.cluster.racks}
        home = {size: home_holders(self.config.model, size) for size in sizes}
        loads = [
            ReplicaLoad(
                holders=home[rack.gpus],
                live=tuple(range(rack.gpus)),
                caps_w=(self.config.emulated.normal_cap_w,) * rack.gpus,
                host=rack.host,
            )
            for rack in self.config.cluster.racks
        ]
        return self.shared_out(loads, [True] * len(loads))

    def _against(self, loads: Sequence[ReplicaLoad], ideal_step_s: float) -> StepPrediction:
        replica_step_s = self._replica_step_s(loads)
        samples = sum(load.num_samples for load in loads)
        step_s = max(replica_step_s, default=0.0) + self.calibration.overhead_s
        if samples == 0 or step_s <= 0.0:
            return StepPrediction(
                step_s=0.0, replica_step_s=replica_step_s, tokens_per_s=0.0, goodput=0.0
            )
        return StepPrediction(
            step_s=step_s,
            replica_step_s=replica_step_s,
            tokens_per_s=samples * self.config.train.seq_len / step_s,
            goodput=min(1.0, ideal_step_s / step_s),
        )

    def _replica_step_s(self, loads: Sequence[ReplicaLoad]) -> tuple[float, ...]:
        on_host: Counter[str] = Counter()
        for load in loads:
            on_host[load.host] += load.num_samples
        per_sample_s = self.calibration.host_s_per_sample
        return tuple(
            max(load.num_samples * self.sample_s(load), per_sample_s * on_host[load.host])
            if load.num_samples
            else 0.0
            for load in loads
        )


def calibrate(
    model: CostModel, loads: Sequence[ReplicaLoad], steps: Sequence[StepObserved]
) -> Calibration:
    """Fit a calibration to recent steps of one shape (medians, so one slow step does not count).

    Args:
        model: the run's model; its present calibration is kept where `steps` say nothing.
        loads: what the replicas carried in those steps.
        steps: at least a few; the first after a reconfiguration is better left out.

    Raises:
        PlanError: a step and `loads` have different numbers of replicas.
    """
    if not steps:
        return model.calibration
    if any(len(step.replica_step_s) != len(loads) for step in steps):
        raise PlanError(f"steps must have one share per replica ({len(loads)})")
    overhead_s = statistics.median(
        max(0.0, step.step_s - max(step.replica_step_s)) for step in steps
    )
    slowest_s = statistics.median(max(step.replica_step_s) for step in steps)
    if model.config.cluster.device != "emulated":
        share = max(load.num_samples * model.sample_s(load) for load in loads) / model.base_step_s
        base_step_s = slowest_s / share if share > 0.0 else model.calibration.base_step_s
        return Calibration(overhead_s=overhead_s, base_step_s=base_step_s)
    return Calibration(overhead_s=overhead_s, host_s_per_sample=_host_s_per_sample(model, steps))


def _host_s_per_sample(model: CostModel, steps: Sequence[StepObserved]) -> float:
    """Busy seconds per sample of a host; hosts are taken to be alike, the busiest counts."""
    known = [step for step in steps if step.compute_s and sum(step.samples)]
    if not known:
        return model.calibration.host_s_per_sample
    hosts = [rack.host for rack in model.config.cluster.racks]
    ratios = []
    for step in known:
        on_host: Counter[str] = Counter()
        for host, count in zip(hosts, step.samples, strict=True):
            on_host[host] += count
        ratios.append(
            max(
                busy_s / on_host[host]
                for host, busy_s, count in zip(hosts, step.compute_s, step.samples, strict=True)
                if count
            )
        )
    return statistics.median(ratios)
