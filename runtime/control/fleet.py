"""What is known of every GPU of the run: its place, its worker, its last sign of progress. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from runtime.config import Config
from runtime.errors import PlanError
from runtime.plan.generation import Standing

# What a proposal is about: replica, its mode, its live slots, its slots with a worker, those that
# are better left out, and its spares.
Facts = tuple[int, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[str, ...]]
WorkerStatus = Literal["absent", "starting", "alive", "dead"]


@dataclass(slots=True)
class GpuView:
    """One GPU as the controller sees it.

    standing: its worker's newest word, None without one. gone_pid: of its last worker that ended.
    said: why its worker says that it cannot go on.
    """

    gpu: str
    replica: int
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
    standing: Standing | None = None


class Fleet:
    """All GPUs of a run by id; one replica per rack, in rack order."""

    def __init__(self, config: Config) -> None:
        self._gpus = {
            gpu: GpuView(gpu=gpu, replica=replica, host=rack.host)
            for replica, rack in enumerate(config.cluster.racks)
            for gpu in rack.ids
        }
        self._ids = [rack.ids for rack in config.cluster.racks]
        self._seats = [rack.seats for rack in config.cluster.racks]

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
            slot
            for slot, gpu in enumerate(self._seats[replica])
            if self._gpus[gpu].status == "alive"
        )

    def seats(self, replica: int) -> tuple[str, ...]:
        """The GPU in every slot of a replica, dead ones included."""
        return self._seats[replica]

    def spares(self, replica: int) -> tuple[str, ...]:
        """GPUs of a replica's rack that live and fill no slot."""
        seated = frozenset(self._seats[replica])
        unseated = [gpu for gpu in self._ids[replica] if gpu not in seated]
        return tuple(gpu for gpu in unseated if self._gpus[gpu].status == "alive")

    def is_spare(self, gpu: str) -> bool:
        return gpu not in self._seats[self._gpus[gpu].replica]

    def seat(self, replica: int, gpus: tuple[str, ...]) -> None:
        """Have the slots of a replica filled by `gpus`; the others of its rack are spares.

        Raises:
            PlanError: one of them is no GPU of the rack, or does not live and is new to its slot.
        """
        for before, gpu in zip(self._seats[replica], gpus, strict=True):
            if gpu not in self or self._gpus[gpu].replica != replica:
                raise PlanError(f"{gpu} is no GPU of replica {replica}'s rack")
            if gpu != before and self._gpus[gpu].status != "alive":
                raise PlanError(f"the spare {gpu} is gone")
        self._seats[replica] = gpus

    def recall_seats(self, replica: int, gpus: tuple[str, ...]) -> None:
        """Go on with the seats an earlier controller had given."""
        self._seats[replica] = gpus

    def started(self, gpu: str, pid: int, now: float) -> None:
        """A fresh worker process is up: it has no state yet."""
        view = self._gpus[gpu]
        view.status, view.pid, view.since, view.pulse_at = "alive", pid, now, now
        view.phase, view.phase_age_s, view.said = "idle", 0.0, ""
        view.standing = Standing(gpu=gpu, generation=0, applied_step=0, layout_generation=0)

    def replace(self, gpu: str, now: float) -> None:
        """Its worker is ended by us; a fresh one is started as soon as it is gone."""
        view = self._gpus[gpu]
        view.status, view.since, view.standing = "starting", now, None
        view.gone_pid, view.pid = view.pid, 0

    def exited(self, gpu: str, now: float) -> None:
        view = self._gpus[gpu]
        view.status, view.pid, view.since, view.standing = "dead", 0, now, None
        view.slowness = 1.0
