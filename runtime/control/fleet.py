"""What is known of every GPU of the run: its place, its worker, its last sign of progress. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from runtime.config import Config
from runtime.plan.generation import Standing

# What a proposal is about: replica, its mode, its live slots, its slots with a worker, and those of
# them that are better left out.
Facts = tuple[int, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
WorkerStatus = Literal["absent", "starting", "alive", "dead"]


@dataclass(slots=True)
class GpuView:
    """One GPU as the controller sees it.

    standing: its worker's newest word, None without one. gone_pid: of its last worker that ended.
    said: why its worker says that it cannot go on. replaced: its worker is ended so that a fresh
    one takes its place.
    """

    gpu: str
    replica: int
    slot: int
    host: str
    status: WorkerStatus = "absent"
    pid: int = 0
    since: float = 0.0
    pulse_at: float = 0.0
    phase: str = "idle"
    phase_age_s: float = 0.0
    slowness: float = 1.0
    gone_pid: int = 0
    said: str = ""
    replaced: bool = False
    standing: Standing | None = None


class Fleet:
    """All GPUs of a run by id; one replica per rack, in rack order."""

    def __init__(self, config: Config) -> None:
        self._gpus = {
            f"{rack.name}/{slot}": GpuView(
                gpu=f"{rack.name}/{slot}", replica=replica, slot=slot, host=rack.host
            )
            for replica, rack in enumerate(config.cluster.racks)
            for slot in range(rack.gpus)
        }

    def __iter__(self) -> Iterator[GpuView]:
        return iter(self._gpus.values())

    def __contains__(self, gpu: str) -> bool:
        return gpu in self._gpus

    def __getitem__(self, gpu: str) -> GpuView:
        return self._gpus[gpu]

    @property
    def living(self) -> frozenset[str]:
        """GPUs that have a living worker."""
        return frozenset(view.gpu for view in self if view.status == "alive")

    def alive(self, replica: int) -> tuple[int, ...]:
        """Slots of a replica that have a living worker, ascending."""
        return tuple(
            view.slot for view in self if view.replica == replica and view.status == "alive"
        )

    def dead(self, replica: int) -> tuple[int, ...]:
        return tuple(
            view.slot
            for view in self
            if view.replica == replica and view.status in ("dead", "absent")
        )

    def started(self, gpu: str, pid: int, now: float) -> None:
        """A fresh worker process is up: it has no state yet."""
        view = self._gpus[gpu]
        view.status, view.pid, view.since, view.pulse_at = "alive", pid, now, now
        view.phase, view.phase_age_s, view.said = "idle", 0.0, ""
        view.standing = Standing(gpu=gpu, generation=0, applied_step=0, layout_generation=0)

    def replace(self, gpu: str, now: float) -> None:
        """Its worker is ended by us; a fresh one is started as soon as it is gone."""
        view = self._gpus[gpu]
        view.status, view.since, view.replaced, view.standing = "starting", now, True, None
        view.gone_pid, view.pid = view.pid, 0

    def exited(self, gpu: str, now: float) -> None:
        view = self._gpus[gpu]
        view.status, view.pid, view.since, view.standing = "dead", 0, now, None
        view.slowness = 1.0
