"""One rank of the steady-state comparison: ours, the bare loop and DTensor with DDP, in turn.

All three live in the same processes and take turns round by round, so that whatever else the
machine does falls on all of them. Rank 0 writes seconds per step of every round.
Run as `python -m runtime.bench.peers.steady_worker JOB.json`, which forks one process a rank.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from runtime.bench.peers.bare import BareLoop, Step
from runtime.bench.peers.dtensor import DTensorLoop
from runtime.bench.peers.steady_job import SteadyJob, SteadyResult
from runtime.engine.engine import Engine
from runtime.layout.takeover import home_holders
from runtime.plan.generation import GenerationPlan, ReplicaPlan

_TIMEOUT = timedelta(seconds=60)


def healthy_plan(job: SteadyJob) -> GenerationPlan:
    """All replicas whole, the batch split evenly."""
    holders = home_holders(job.config.model, job.degree)
    return GenerationPlan(
        run="steady",
        generation=1,
        store_host="127.0.0.1",
        store_port=job.port,
        replicas=tuple(
            ReplicaPlan(
                replica=replica,
                rack=f"rack-{replica}",
                mode="training",
                gpus=tuple(f"rack-{replica}/{slot}" for slot in range(job.degree)),
                live=tuple(range(job.degree)),
                holders=holders,
                num_samples=job.config.train.global_batch // job.num_replicas,
            )
            for replica in range(job.num_replicas)
        ),
    )


def _ours(job: SteadyJob, rank: int) -> Step:
    plan = healthy_plan(job)
    engine = Engine(job.config, plan.members()[rank], abort=threading.Event())
    engine.enter(plan)

    def step() -> float:
        result = engine.step(before_commit=lambda: None)
        return result.loss * result.tokens

    return step


def _bare(job: SteadyJob, rank: int) -> Step:
    replica, slot = divmod(rank, job.degree)
    ranks = range(job.num_replicas * job.degree)
    of_replica = [
        dist.new_group([r for r in ranks if r // job.degree == each])
        for each in range(job.num_replicas)
    ]
    of_slot = [
        dist.new_group([r for r in ranks if r % job.degree == each]) for each in range(job.degree)
    ]
    loop = BareLoop(
        job.config,
        replica=replica,
        slot=slot,
        degree=job.degree,
        replica_group=of_replica[replica],
        peer_group=of_slot[slot] if job.num_replicas > 1 else None,
    )
    return lambda: loop.step(job.num_replicas)


def _whole_loss(program: str, loss: float) -> float:
    """Summed loss of the global batch; every rank calls it. Ours already is."""
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size() if program == "ours" else float(total)


def measure(job: SteadyJob, rank: int) -> SteadyResult:
    """Take turns until `job.seconds` have passed; every rank calls it."""
    programs: dict[str, Step] = {"ours": _ours(job, rank), "bare": _bare(job, rank)}
    dtensor = DTensorLoop(job.config, num_replicas=job.num_replicas, degree=job.degree)
    programs["dtensor"] = dtensor.step
    tokens = job.config.train.global_batch * job.config.train.seq_len
    first_losses: dict[str, list[float]] = {}
    for name, step in programs.items():
        sums = [_whole_loss(name, step()) for _ in range(3)]
        factor = 1 if name == "ours" else job.degree
        first_losses[name] = [value / factor / tokens for value in sums]
    step_s: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    deadline = time.monotonic() + job.seconds
    going = torch.ones(1)
    while float(going) > 0:
        for name in names:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(job.steps):
                programs[name]()
            dist.barrier()
            step_s[name].append((time.perf_counter() - began) / job.steps)
        names = names[1:] + names[:1]
        going.fill_(float(time.monotonic() < deadline))
        dist.broadcast(going, 0)
    return SteadyResult(step_s=step_s, first_losses=first_losses)


def main(path: str, rank: int) -> None:
    torch.set_num_threads(1)
    job = msgspec.json.decode(Path(path).read_bytes(), type=SteadyJob)
    world = job.num_replicas * job.degree
    store = TCPStore("127.0.0.1", job.port, is_master=rank == 0, timeout=_TIMEOUT)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("peers", store),
        rank=rank,
        world_size=world,
        timeout=_TIMEOUT,
    )
    result = measure(job, rank)
    dist.barrier()
    if rank == 0:
        whole = Path(job.result).with_suffix(".part")
        whole.write_bytes(msgspec.json.encode(result))
        whole.rename(job.result)
    dist.destroy_process_group()


def start_all(path: str) -> None:
    """One process a rank, waited for; forked, as importing torch in each would take longer than
    the measurement."""
    job = msgspec.json.decode(Path(path).read_bytes(), type=SteadyJob)
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=main, args=(path, rank))
        for rank in range(job.num_replicas * job.degree)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()


if __name__ == "__main__":
    start_all(sys.argv[1])
