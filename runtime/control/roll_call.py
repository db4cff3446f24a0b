"""Agents and workers that come and go: who is started, who is up, who is gone. Pure.

What a worker's coming or going means for the generation is the coordinator's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.control import messages as m
from runtime.control.instructions import Finish

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator


class RollCall:
    """Takes the words of agents on their workers' processes."""

    def __init__(self) -> None:
        self._agents: dict[str, int] = {}

    def hello(self, coordinator: Coordinator, hello: m.AgentHello, now: float) -> None:
        """A (re)connected agent: start what never ran; take note of what died unseen."""
        missing = []
        another = self._agents.get(hello.host, hello.pid) != hello.pid
        self._agents[hello.host] = hello.pid
        for view in coordinator.fleet:
            if view.host != hello.host:
                continue
            pid = hello.workers.get(view.gpu)
            if pid is not None and pid == view.gone_pid:
                # The order to end it may have been lost; whoever starts next comes after it.
                self.kill(coordinator, view.gpu, pid)
                pid = None
            first = view.status == "absent" and coordinator.phase == "starting"
            # No GPU was left, and a host is back: its processes are gone, its GPUs need not be.
            if another and coordinator.phase == "restoring":
                first = first or view.status == "dead"
            if pid is None and (first or view.status == "starting"):
                missing.append(view.gpu)
                view.status, view.since = "starting", now
            elif pid is None and view.status == "alive":
                coordinator.lose(view.gpu, now, now, "its process is gone")
        if coordinator.phase == "ended":
            coordinator.order(m.Quit(), hello.host)
            return
        coordinator.power.hello(coordinator, hello)
        coordinator.examiner.hello(coordinator, hello.host)
        if missing:
            start = m.StartWorkers(gpus=tuple(missing), store=coordinator.store)
            coordinator.order(start, hello.host)
        self._tell_again(coordinator, hello.host)

    def _tell_again(self, coordinator: Coordinator, host: str) -> None:
        """A (re)connected agent may have missed the last order about the generation."""
        slowness = {view.gpu: view.slowness for view in coordinator.fleet if view.slowness != 1.0}
        if slowness:
            coordinator.order(m.SetDevice(slowness=slowness), host)
        if coordinator.plan is None:
            return
        if coordinator.phase == "leaving":
            coordinator.order(
                m.LeaveGeneration(generation=coordinator.number, abort=coordinator.change.aborts),
                host,
            )
        elif coordinator.phase == "entering":
            coordinator.order(m.EnterGeneration(plan=coordinator.plan), host)
        elif coordinator.phase == "saving":
            coordinator.checkpoints.last.tell(coordinator, host)
        elif coordinator.phase == "training":
            coordinator.checkpoints.tell(coordinator, host)

    def ready(self, coordinator: Coordinator, ready: m.WorkerReady, now: float) -> None:
        """A worker's process is up."""
        view = coordinator.fleet[ready.gpu]
        if ready.pid in (view.pid, view.gone_pid) or coordinator.phase == "ended":
            return
        if view.status == "alive":
            coordinator.lose(ready.gpu, now, now, "another worker took its place")
        coordinator.fleet.started(ready.gpu, ready.pid, now)
        coordinator.examiner.worker_back(coordinator, ready.gpu, now)
        if coordinator.phase == "starting":
            self.start_when_ready(coordinator, now)
            return
        if coordinator.phase == "restoring" and coordinator.change.restart:
            return  # One of many that were replaced.
        back = f"{ready.gpu} is back" + (", as a spare" * coordinator.fleet.is_spare(ready.gpu))
        coordinator.event("gpu_repaired", "info", back, now, ready.gpu)
        coordinator.desk.note(view.replica, now, back)
        coordinator.desk.refresh(coordinator, now)

    def exited(self, coordinator: Coordinator, exited: m.WorkerExited, now: float) -> None:
        """A worker's process is gone."""
        view = coordinator.fleet[exited.gpu]
        # An agent tells again: the end of an earlier worker says nothing about the present one.
        unseen = view.status == "starting" and exited.pid != view.gone_pid
        if (exited.pid != view.pid and not unseen) or coordinator.phase == "ended":
            return
        view.gone_pid = exited.pid
        how = f"signal {-exited.code}" if exited.code < 0 else f"exit code {exited.code}"
        said = f" ({view.said})" if view.said else ""
        why = f"its worker ended by {how}{said}"
        coordinator.lose(exited.gpu, min(exited.at, now), now, why)

    def host_lost(self, coordinator: Coordinator, host: str, now: float) -> None:
        """An agent stayed away past its deadline: its GPUs are gone for this run."""
        for view in coordinator.fleet:
            if view.host == host and view.status in ("alive", "starting"):
                coordinator.lose(view.gpu, now, now, f"agent {host} is gone")

    def kill(self, coordinator: Coordinator, gpu: str, pid: int) -> None:
        """Have the agent end the process `pid` on a GPU, and no other."""
        coordinator.order(m.KillWorker(gpu=gpu, pid=pid), coordinator.fleet[gpu].host)

    def start_afresh(self, coordinator: Coordinator, gpu: str) -> None:
        """Have a fresh process on a GPU, as soon as the last one is gone, if it is still there."""
        view = coordinator.fleet[gpu]
        if view.gone_pid:
            self.kill(coordinator, gpu, view.gone_pid)
        start = m.StartWorkers(gpus=(gpu,), store=coordinator.store)
        coordinator.order(start, view.host)

    def give_up(self, coordinator: Coordinator, gpu: str) -> None:
        """A worker is gone for us, though its process may still be there: it must not come back."""
        view = coordinator.fleet[gpu]
        view.gone_pid = view.pid
        self.kill(coordinator, gpu, view.pid)

    def start_when_ready(self, coordinator: Coordinator, now: float) -> None:
        """Form the first generation when every worker is up, or those that are at the deadline."""
        fleet = coordinator.fleet
        late = now - coordinator.began_at > coordinator.config.control.join_deadline_s
        alive = any(view.status == "alive" for view in fleet)
        pending = any(view.status in ("absent", "starting") for view in fleet)
        if pending and not (late and alive):
            return
        if not alive:
            reason = f"no worker came up; the last one: {coordinator.last_words}"
            coordinator.end(Finish(status="failed", reason=reason), now)
            return
        for view in fleet:
            if view.status != "alive":
                coordinator.lose(view.gpu, now, now, "it did not come up in time")
        coordinator.form_next(now)
