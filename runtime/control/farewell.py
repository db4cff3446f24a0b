"""The end of a run: caps go back first and the journal tells what was set; then everybody may go.

An agent that does not say so within the deadline keeps nobody waiting: it gives every cap back when
it ends, and the next one on its host does if it was killed. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.control import messages as m
from runtime.control.instructions import Finish

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator

RETURN_S = 2.0


class Farewell:
    """Between the decision that a run is over and its last words."""

    def __init__(self) -> None:
        self._finish: Finish | None = None
        self._hosts: set[str] = set()
        self._until = 0.0

    def begin(self, coordinator: Coordinator, finish: Finish, now: float) -> None:
        """The run is over: have caps given back where some were set."""
        living = {view.host for view in coordinator.fleet if view.status == "alive"}
        self._finish, self._until = finish, now + RETURN_S
        self._hosts = living & coordinator.power.hosts
        for host in sorted(self._hosts):
            coordinator.order(m.ReturnCaps(), host)
        self.look(coordinator, now)

    def returned(self, coordinator: Coordinator, told: m.CapsReturned, now: float) -> None:
        """A host's caps are as they were found; what was set for that, it has told before."""
        self._hosts.discard(told.host)
        self.look(coordinator, now)

    def look(self, coordinator: Coordinator, now: float) -> None:
        """Say the last words once nobody is waited for any more."""
        if self._finish is None or (self._hosts and now < self._until):
            return
        finish, self._finish = self._finish, None
        for host in sorted(self._hosts):
            text = f"{host} has not said whether its caps went back to what they were before"
            coordinator.event("caps_not_returned", "warning", text, now)
        coordinator.progress.ended(finish, now)
        coordinator.order(m.Quit())
        coordinator.outgoing.put(finish)
