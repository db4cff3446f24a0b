"""torchft on the same model: its lighthouse and ranks (`JOB.json`), or one rank (`JOB.json R S`).

The wiring that behaves: quorum started before forward, one flat bucket through
`manager.allreduce(...).wait()`, then `should_commit`; its own DDP wrapper with gloo kills the
survivor when a peer dies. torchft binds every interface and offers no choice, so this must run in
a network namespace of its own. A replica's share of the batch stays as it is: with fewer
replicas torchft's global batch shrinks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from runtime.bench.peers.bare import BareLoop
from runtime.bench.peers.jobs import PeerJob, PeerLog, read_job

_ADDRESS = "127.0.0.1"


def serve(job: PeerJob, path: str) -> None:
    """Run the lighthouse here and every rank as a child; ends when all of them have."""
    from torchft.coordination import LighthouseServer

    waits: dict[str, Any] = {"join_timeout_ms": 100}
    if job.timeout_ms:
        waits = {"join_timeout_ms": job.timeout_ms, "heartbeat_timeout_ms": job.timeout_ms}
    lighthouse = LighthouseServer(bind=f"[::]:{job.port}", min_replicas=1, **waits)
    children = []
    for replica in range(job.num_replicas):
        for slot in range(job.degree):
            command = [sys.executable, "-m", __spec__.name, path, str(replica), str(slot)]
            children.append(subprocess.Popen(command))
    for child in children:
        child.wait()
    lighthouse.shutdown()


def train(job: PeerJob, replica: int, slot: int) -> None:
    """Train until killed."""
    import torchft

    torch.set_num_threads(1)
    log = PeerLog(Path(job.folder))
    port = job.port + 1 + replica
    store = TCPStore(_ADDRESS, port, world_size=job.degree, is_master=slot == 0)
    dist.init_process_group(
        "gloo", store=PrefixStore("tp", store), rank=slot, world_size=job.degree
    )
    loop = BareLoop(
        job.config, replica=replica, slot=slot, degree=job.degree, replica_group=dist.group.WORLD
    )
    state = loop.state

    def load(saved: dict[str, Any]) -> None:
        for own, given in zip(state.moving(), saved["tensors"], strict=True):
            own.copy_(given)
        state.applied_step = saved["applied_step"]

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=load,
        state_dict=lambda: {"tensors": list(state.moving()), "applied_step": state.applied_step},
        min_replica_size=1,
        rank=slot,
        world_size=job.degree,
        store_addr=_ADDRESS,
        store_port=port,
        lighthouse_addr=f"http://{_ADDRESS}:{job.port}",
        replica_id=f"replica-{replica}",
        hostname=_ADDRESS,
    )
    log.started(replica, slot, os.getpid())
    while True:
        manager.start_quorum()
        loop.backward(job.num_replicas)
        manager.allreduce(state.grads).wait()
        if manager.should_commit():
            loop.apply()
            if slot == 0 and manager.num_participants() > 0:
                log.committed(state.applied_step - 1, replica)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(read_job(sys.argv[1]), sys.argv[1])
    else:
        train(read_job(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
