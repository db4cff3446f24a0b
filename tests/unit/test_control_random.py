"""Whatever happens in whatever order: the invariants of DESIGN sections 5, 7 and 10 hold."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import CheckpointConfig, PolicyConfig
from storage.commands import Pause, Resume
from tests.support.control_cluster import SimCluster, sim_config

GPUS = st.integers(0, 8)


def _gpu(cluster: SimCluster, index: int) -> str:
    names = sorted(cluster.host_of)
    return names[index % len(names)]


def _kill(cluster: SimCluster, index: int) -> None:
    gpu = _gpu(cluster, index)
    # Something is left to go on with: the end of a run has tests of its own.
    replica = gpu.partition("/")[0]
    others = [w for w in cluster.workers.values() if not w.gpu.startswith(replica) and not w.silent]
    if gpu in cluster.workers and len(others) > 1:
        cluster.kill(gpu)


def _kill_any(cluster: SimCluster, index: int) -> None:
    if _gpu(cluster, index) in cluster.workers:
        cluster.kill(_gpu(cluster, index))


def _hang(cluster: SimCluster, index: int) -> None:
    if _gpu(cluster, index) in cluster.workers:
        cluster.stop(_gpu(cluster, index))


def _jam(cluster: SimCluster, index: int) -> None:
    if _gpu(cluster, index) in cluster.workers:
        cluster.jam(_gpu(cluster, index))


def _repair(cluster: SimCluster, index: int) -> None:
    cluster.fault(_gpu(cluster, index), "repair")


def _slow(cluster: SimCluster, index: int) -> None:
    cluster.fault(_gpu(cluster, index), "slow", 1.5)


def _answer(verdict: str) -> Callable[[SimCluster, int], None]:
    def answer(cluster: SimCluster, index: int) -> None:
        waiting = list(cluster.proposals.values())[-4:]
        if waiting:
            proposal = waiting[index % len(waiting)]
            option = None if index % 2 else index % len(proposal.options)
            cluster.decide(proposal, verdict, option=option if verdict == "approved" else None)

    return answer


def _trigger(cluster: SimCluster, index: int) -> None:
    kinds = ("drop", "grow", "shrink", "carry_on", "replace", "restart")
    cluster.trigger(index % 3, kinds[index % 6])


def _commit_in_part(cluster: SimCluster, index: int) -> None:
    """A rank dies in the middle of a commit that some ranks came out of."""
    plan = cluster.coordinator.plan
    if plan is None or cluster.coordinator.phase != "training":
        return
    members = plan.members()
    if cluster.ranks.together(plan) is None or any(cluster.workers[g].leaving for g in members):
        return
    some = members[: 1 + index % len(members)]
    cluster.commit_on(*some, told=index % 2 == 0 and members[0] in some)
    # `told` is the word of rank 0, which is then on its way and arrives before its end.
    _kill(cluster, index)
    if all(gpu in cluster.workers for gpu in members):
        # It was spared: the others get out of the commit as well.
        done = cluster.workers[some[0]].last
        assert done is not None
        for gpu in members[len(some) :]:
            cluster.ranks.apply(cluster.workers[gpu], done)
        cluster.from_agent(members[0], done)
        cluster.ranks.begin_step(plan)


def _cut(cluster: SimCluster, index: int) -> None:
    host = sorted(set(cluster.host_of.values()))[index % 2]
    if host in cluster.cut:
        cluster.reconnect(host)
    else:
        cluster.disconnect(host)


def _kill_all(cluster: SimCluster, index: int) -> None:
    cluster.kill(*sorted(cluster.workers))


def _pause_or_resume(cluster: SimCluster, index: int) -> None:
    kind = Pause if index % 2 else Resume
    cluster.submit(kind(id=f"{cluster.now}-{index}", at=cluster.now, who="ada", via="cli"))


def _wait(cluster: SimCluster, index: int) -> None:
    cluster.run((0.001, 0.03, 0.1, 0.4, 1.1, 3.0)[index % 6])


ACTIONS = {
    "kill": _kill,
    "kill any": _kill_any,
    "hang": _hang,
    "jam": _jam,
    "repair": _repair,
    "slow": _slow,
    "approve": _answer("approved"),
    "reject": _answer("rejected"),
    "trigger": _trigger,
    "commit in part": _commit_in_part,
    "pause or resume": _pause_or_resume,
    "cut or reconnect": _cut,
    "wait": _wait,
}
LAST_RESORT = {"kill all": _kill_all}
HISTORIES = st.lists(
    st.tuples(st.sampled_from([*ACTIONS, "wait", "wait", "approve", "repair"]), GPUS),
    min_size=3,
    max_size=40,
)
POLICIES = st.sampled_from(
    [
        PolicyConfig(),
        PolicyConfig(shrink="auto", grow="auto"),
        PolicyConfig(shrink="auto_after_deadline", deadline_s=1.0, expires_s=2.0),
    ]
)


@settings(max_examples=150)
@given(history=HISTORIES, policy=POLICIES)
def test_any_history_keeps_the_invariants(
    history: list[tuple[str, int]], policy: PolicyConfig
) -> None:
    config = sim_config(2, 2, 2, hosts=("a", "b", "b"), step_s=0.3, policy=policy)
    cluster = SimCluster(config)
    cluster.run_steps(3)
    _play(cluster, history)


@settings(max_examples=100)
@given(
    history=st.lists(
        st.tuples(st.sampled_from([*ACTIONS, "kill all", "wait", "repair", "repair"]), GPUS),
        min_size=3,
        max_size=40,
    )
)
def test_any_history_with_spares_and_checkpoints(history: list[tuple[str, int]]) -> None:
    config = sim_config(2, 2, 2, hosts=("a", "b", "b"), step_s=0.3)
    racks = tuple(msgspec.structs.replace(rack, spares=1) for rack in config.cluster.racks)
    config = msgspec.structs.replace(
        config,
        cluster=msgspec.structs.replace(config.cluster, racks=racks),
        checkpoint=CheckpointConfig(every_steps=2, write_deadline_s=20.0),
    )
    cluster = SimCluster(config, checkpoints="/ckpt")
    cluster.run_until(lambda: bool(cluster.seals))
    _play(cluster, history)


def _play(cluster: SimCluster, history: list[tuple[str, int]]) -> None:
    # A host that is away for too long is given up; what it knew alone is then lost.
    cluster.gone_for_good = any(name == "cut or reconnect" for name, _ in history)
    for name, index in history:
        if cluster.finish is not None:
            break
        (ACTIONS | LAST_RESORT)[name](cluster, index)
        cluster.run(0.02)
        cluster.check()
    for host in list(cluster.cut):
        cluster.reconnect(host)
    if cluster.finish is None:
        cluster.coordinator.finish("stopped", "the test is over", cluster.now)
        cluster._carry_out(cluster.coordinator.outgoing.take())
        cluster.run(30.0)
    if cluster.finish is None:
        # Only where everybody hangs.
        assert cluster.events("run_stalled"), cluster.coordinator.phase
        cluster.coordinator.end_now("the test is over", cluster.now)
        cluster._carry_out(cluster.coordinator.outgoing.take())
    cluster.check()
    assert all(proposal.is_final for proposal in cluster.proposals.values())
