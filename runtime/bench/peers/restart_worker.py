"""One rank under torchrun: the bare loop with a checkpoint every few steps, restarted as a whole.

What most runs do today: any failure ends all ranks, the elastic agent starts them anew, and they
go on from the newest checkpoint. Run by `torch.distributed.run -m` this module, with `JOB.json`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.bench.peers.bare import BareLoop
from runtime.bench.peers.jobs import PeerJob, PeerLog, read_job


def train(job: PeerJob) -> None:
    """Train until killed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), range(job.num_replicas * job.degree)
    replica, slot = divmod(rank, job.degree)
    of_replica = [
        dist.new_group([r for r in ranks if r // job.degree == i]) for i in range(job.num_replicas)
    ]
    of_slot = [dist.new_group([r for r in ranks if r % job.degree == i]) for i in range(job.degree)]
    loop = BareLoop(
        job.config,
        replica=replica,
        slot=slot,
        degree=job.degree,
        replica_group=of_replica[replica],
        peer_group=of_slot[slot],
    )
    folder, log = Path(job.folder), PeerLog(Path(job.folder))
    _load(loop, folder, rank)
    log.started(replica, slot, os.getpid())
    while True:
        loop.step(job.num_replicas)
        step = loop.state.applied_step
        if slot == 0:
            log.committed(step - 1, replica)
        if step % job.checkpoint_every == 0:
            _save(loop, folder, rank)


def _save(loop: BareLoop, folder: Path, rank: int) -> None:
    """Every rank its part; the newest step counts once all of its parts are there."""
    step = loop.state.applied_step
    part = folder / f"step-{step:06d}-{rank}.pt"
    torch.save(loop.state.moving(), part.with_suffix(".tmp"))
    part.with_suffix(".tmp").rename(part)
    dist.barrier()
    if rank == 0:
        (folder / f"step-{step:06d}-whole").touch()


def _load(loop: BareLoop, folder: Path, rank: int) -> None:
    newest = max(folder.glob("step-*-whole"), default=None)
    if newest is None:
        return
    step = newest.name.split("-")[1]
    for own, saved in zip(
        loop.state.moving(), torch.load(folder / f"step-{step}-{rank}.pt"), strict=True
    ):
        own.copy_(saved)
    loop.state.applied_step = int(step)


if __name__ == "__main__":
    train(read_job(sys.argv[1]))
