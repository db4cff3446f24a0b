"""One SIGKILL in a run of each kind: seconds to the next committed step, and what is left of it.

Ours, torchft (as it comes and tuned), and a torchrun restart from a checkpoint: the same model and
replicas, as fast as the machine goes. Also a rank that stands still (SIGSTOP) or hangs.
"""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from runtime.bench.drill import START_DEADLINE_S, WHO, Drill, Mark
from runtime.bench.peers.jobs import Committed, PeerJob, PeerLog
from runtime.bench.peers.outside import (
    NotRunnable,
    peers_python,
    require,
    secluded,
    started,
    steps_per_s,
    wait_until,
)
from runtime.config import Config
from runtime.control.local import LocalRun
from runtime.control.supervisor import free_port
from storage.commands import Fault
from storage.records import GenerationFormed, StepCommitted

HEALTHY_STEPS = 12
DEGRADED_STEPS = 12
DEADLINE_S = 30.0
# A peer that has not gone on by then is not measured: that happens to torchft tuned to 1 s.
PEER_DEADLINE_S = 15.0


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """What one loss cost. ranks_in_play: that train afterwards. throughput: committed tokens a
    second while degraded over the healthy ones before; None when not looked at."""

    recovery_s: float
    steps_redone: int
    ranks_in_play: int
    throughput: float | None = None
    step_s: float = 0.0


# ours ------------------------------------------------------------------------------------------


def ours(config: Config) -> tuple[Recovered, float]:
    """SIGKILL to rack-1/1 of a run of ours; with it, seconds until the survivors all train.

    Needs policy `shrink = "auto"`.
    """
    with _running(config) as (run, drill):
        drill.more_steps(HEALTHY_STEPS)
        healthy = _tokens_per_s(drill.commits[-HEALTHY_STEPS:])
        mark = drill.kill("rack-1/1")
        resumed = drill.next_generation(mark)
        wanted = sum(rack.gpus for rack in config.cluster.racks) - 1
        formed = run.wait_for(
            lambda entry: isinstance(entry, GenerationFormed) and _ranks(entry) == wanted,
            DEADLINE_S,
            after=mark.index,
        )
        drill.more_steps(DEGRADED_STEPS)
        since = [c for c in drill.commits if c.generation == formed.generation][1:]
        steps = [commit.step for commit in drill.commits]
        batch = config.train.global_batch * config.train.seq_len
        return Recovered(
            recovery_s=resumed.at - mark.at,
            steps_redone=len(steps) - len(set(steps)),
            ranks_in_play=_ranks(formed),
            throughput=_tokens_per_s(since) / healthy,
            step_s=batch / healthy,
        ), formed.at - mark.at


def fenced(config: Config) -> dict[str, float]:
    """Seconds from a rank's standing still to the next commit without it, one after the other:
    "stop" (SIGSTOP) and "hang" (injected: alive, with heartbeats)."""
    found: dict[str, float] = {}
    with _running(config) as (run, drill):
        for fault, gpu in (("stop", "rack-1/1"), ("hang", "rack-0/1")):
            # The deadline follows the pace once there is one.
            drill.more_steps(5)
            mark = _strike(run, drill, gpu, fault)
            found[fault] = drill.next_generation(mark).at - mark.at
    return found


@contextmanager
def _running(config: Config) -> Iterator[tuple[LocalRun, Drill]]:
    with (
        tempfile.TemporaryDirectory(prefix="counterpoise-peers-") as folder,
        LocalRun(config, home=Path(folder)) as run,
    ):
        drill = Drill(run)
        drill.more_steps(5, START_DEADLINE_S)
        yield run, drill


def _strike(run: LocalRun, drill: Drill, gpu: str, fault: str) -> Mark:
    mark = drill.mark()
    if fault == "stop":
        os.kill(drill.pids()[gpu], signal.SIGSTOP)
    else:
        run.submit(Fault(id=uuid.uuid4().hex, at=mark.at, who=WHO, via="cli", gpu=gpu, kind="hang"))
    return mark


def _ranks(formed: GenerationFormed) -> int:
    return sum(len(r.live) for r in formed.replicas if r.mode == "training")


def _tokens_per_s(commits: Sequence[StepCommitted]) -> float:
    if len(commits) < 2:
        return 0.0
    return sum(c.tokens for c in commits[1:]) / (commits[-1].at - commits[0].at)


# the peers -------------------------------------------------------------------------------------


def torchft(
    config: Config,
    num_replicas: int,
    degree: int,
    timeout_ms: int = 0,
    fault: str = "kill",
    *,
    settle: bool = True,
    deadline_s: float = PEER_DEADLINE_S,
) -> Recovered:
    """Lose one rank of the last replica of a torchft run: it takes its whole replica along.

    settle: measure the throughput that is left, too.

    Raises:
        NotRunnable: says why.
    """
    require("torchft")
    with tempfile.TemporaryDirectory(prefix="counterpoise-torchft-") as name:
        folder = Path(name)
        job = _job(config, num_replicas, degree, folder, timeout_ms)
        module = "runtime.bench.peers.torchft_worker"
        command = secluded([peers_python(), "-m", module, str(job)])
        with started(command, folder, TORCHFT_TIMEOUT_SEC="60") as log:
            _run_healthy(log, folder, num_replicas)
            before = log.commits(0)[-HEALTHY_STEPS:]
            struck = _kill(log, num_replicas - 1, 1, fault)
            _wait_after(log, folder, struck, DEGRADED_STEPS if settle else 1, deadline_s)
            after = [c for c in log.commits(0) if c.at > struck]
        after = _after_gap(after, steps_per_s(before))
        share = (num_replicas - 1) / num_replicas
        return Recovered(
            recovery_s=after[0].at - struck,
            steps_redone=_redone(before, after),
            ranks_in_play=(num_replicas - 1) * degree,
            throughput=share * steps_per_s(after) / steps_per_s(before) if settle else None,
            step_s=1.0 / steps_per_s(before),
        )


def restart(config: Config, num_replicas: int, degree: int) -> Recovered:
    """Kill one rank under torchrun: all ranks start again from the newest checkpoint.

    Raises:
        NotRunnable: says why.
    """
    with tempfile.TemporaryDirectory(prefix="counterpoise-restart-") as name:
        folder = Path(name)
        job = _job(config, num_replicas, degree, folder, 0)
        command = secluded(
            [
                peers_python(), "-m", "torch.distributed.run", "--standalone",
                "--local-addr", "127.0.0.1", "--max-restarts", "3",
                "--nproc-per-node", str(num_replicas * degree),
                "-m", "runtime.bench.peers.restart_worker", str(job),
            ]
        )  # fmt: skip
        # Without it keys of the previous attempt stay in the shared store, and some never resume.
        with started(command, folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as log:
            _run_healthy(log, folder, num_replicas)
            before = log.commits(0)[-HEALTHY_STEPS:]
            struck = _kill(log, num_replicas - 1, 1, "kill")
            _wait_after(log, folder, struck, 1, PEER_DEADLINE_S)
            after = [c for c in log.commits(0) if c.at > struck]
        after = _after_gap(after, steps_per_s(before))
        return Recovered(
            recovery_s=after[0].at - struck,
            steps_redone=_redone(before, after),
            ranks_in_play=num_replicas * degree,
            throughput=0.0,
            step_s=1.0 / steps_per_s(before),
        )


def _job(config: Config, num_replicas: int, degree: int, folder: Path, timeout_ms: int) -> Path:
    path = folder / "job.json"
    job = PeerJob(
        config=config,
        num_replicas=num_replicas,
        degree=degree,
        port=free_port(),
        folder=str(folder),
        timeout_ms=timeout_ms,
    )
    path.write_bytes(msgspec.json.encode(job))
    return path


def _run_healthy(log: PeerLog, folder: Path, num_replicas: int) -> None:
    wait_until(
        lambda: all(len(log.commits(r)) > HEALTHY_STEPS + 5 for r in range(num_replicas)),
        START_DEADLINE_S,
        "healthy steps",
        folder,
    )


def _kill(log: PeerLog, replica: int, slot: int, fault: str) -> float:
    at = time.time()
    os.kill(log.pid(replica, slot), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    return at


def _wait_after(log: PeerLog, folder: Path, struck: float, count: int, deadline_s: float) -> None:
    """Wait for `count` commits after the gap; a step that was just ending may come before it."""
    wait_until(
        lambda: sum(c.at > struck + 0.5 for c in log.commits(0)) >= count,
        deadline_s,
        "step after the fault",
        folder,
    )


def _after_gap(after: Sequence[Committed], healthy_steps_per_s: float) -> list[Committed]:
    """`after` without a step that had synchronised before the fault and still ended."""
    pauses = [later.at - earlier.at for earlier, later in itertools.pairwise(after)]
    widest = max(range(len(pauses)), key=pauses.__getitem__, default=0)
    if pauses and widest == 0 and pauses[0] > 3.0 / healthy_steps_per_s:
        return list(after[1:])
    return list(after)


def _redone(before: Sequence[Committed], after: Sequence[Committed]) -> int:
    return max(0, before[-1].step + 1 - after[0].step)


def or_reason(measure: Callable[[], Recovered]) -> Recovered | str:
    """What `measure` finds, or the words "not measured: why"."""
    try:
        return measure()
    except NotRunnable as error:
        return f"not measured: {error}"
