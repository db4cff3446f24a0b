"""A controller that is killed and started again, over simulated agents."""

from __future__ import annotations

import msgspec

from runtime.control import messages as m
from runtime.control.coordinator import Coordinator
from runtime.control.memory import Memory, recall, remember
from storage.records import JournalEntry, Proposal, ProposalChanged
from tests.support.control_cluster import SimCluster


def restart_controller(cluster: SimCluster) -> None:
    """A new coordinator takes over from the memory, the plans and the journal of the old one."""
    old = cluster.coordinator
    memory = msgspec.json.decode(msgspec.json.encode(remember(old, "")), type=Memory)
    plans = {order.plan.generation: order.plan for order in cluster.ordered(m.EnterGeneration)}
    fresh = Coordinator(
        cluster.config,
        run="sim",
        store=("127.0.0.1", 1),
        now=cluster.began_at,
        checkpoints=cluster.checkpoints,
    )
    cluster.coordinator = fresh
    recall(fresh, memory, plans, _journal(cluster), cluster.now)
    cluster._carry_out(fresh.outgoing.take())
    for host in sorted(set(cluster.host_of.values())):
        cluster._to_controller(host, cluster._hello(host))
    for worker in list(cluster.workers.values()):
        if worker.parked and worker.generation:
            cluster.ranks.park(worker, worker.generation)


def _journal(cluster: SimCluster) -> list[JournalEntry]:
    return [
        ProposalChanged(seq=0, at=cluster.now, run="sim", proposal=entry)
        if isinstance(entry, Proposal)
        else entry
        for entry in cluster.entries
    ]
