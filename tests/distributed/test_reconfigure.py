"""From generation to generation: state moves bit for bit, no step is lost or applied twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from runtime.engine.reference import Reference
from runtime.layout.takeover import home_holders
from runtime.layout.units import without
from runtime.plan.generation import NOT_FINITE, RollForward
from tests.support.engine_checks import (
    GQA,
    UNTIED,
    assert_same_params,
    assert_same_steps,
    assert_same_units,
    small_config,
    unit_states,
)
from tests.support.engine_pool import DEADLINE_S, Cluster, Part, RankFailed

MakeCluster = Callable[..., Cluster]
ALL = (0, 1, 2, 3)
WHOLE = (Part(ALL, 4), Part(ALL, 3))


def start(
    cluster: MakeCluster, parts: Sequence[Part] = WHOLE, model: Any = GQA, sync: Any = "direct"
) -> Any:
    """A running cluster of 4 + 4 and the reference beside it."""
    run = cluster(small_config(model, sync=sync), [4, 4])
    run.enter(run.make_plan(parts))
    return run, Reference(run.config, dtype=torch.float64)


def go_on(run: Cluster, reference: Reference, count: int = 2) -> None:
    assert_same_steps(run.everyone("steps", count), reference, rtol=1e-11)
    assert_same_params(run, reference, atol=1e-9)


def survivors_sources(run: Cluster, dead: Sequence[str] = ()) -> dict[str, Any]:
    assert run.plan is not None
    return {
        gpu: (replica.replica, replica.holders)
        for replica in run.plan.replicas
        for gpu in replica.gpus
        if gpu in run.plan.members() and gpu not in dead
    }


@pytest.mark.parametrize("model", [GQA, UNTIED], ids=["gqa-tied", "mha-untied"])
def test_shrink_and_grow_keep_every_bit(cluster: MakeCluster, model: Any) -> None:
    run, reference = start(cluster, model=model)
    go_on(run, reference)
    before = unit_states(run)
    run.enter(run.make_plan([Part((0, 1, 3), 3), Part(ALL, 4)], applied_step=2))
    assert_same_units(before, unit_states(run))
    go_on(run, reference)
    before = unit_states(run)
    # Slot 2 comes back as a fresh process: it is no source and receives all it needs.
    run.call({"r0/2": ("new", run.config, "r0/2", "float64")})
    reports = run.enter(run.make_plan(WHOLE, applied_step=4))
    assert_same_units(before, unit_states(run))
    assert reports["r0/2"].bytes_received > 0
    assert reports["r0/0"].bytes_received == 0
    assert run.layouts() == run.homes
    go_on(run, reference)


def test_a_lone_replica_moves_units_between_its_slots(cluster: MakeCluster) -> None:
    run = cluster(small_config(GQA), [4])
    run.enter(run.make_plan([Part(ALL, 7)]))
    reference = Reference(run.config, dtype=torch.float64)
    go_on(run, reference)
    before = unit_states(run)
    lopsided = {
        family: tuple((slot + unit) % 4 for unit, slot in enumerate(slots))
        for family, slots in run.homes[0].items()
    }
    run.enter(run.make_plan([Part(ALL, 7, holders=lopsided)], applied_step=2))
    assert_same_units(before, unit_states(run))
    go_on(run, reference)


@pytest.mark.parametrize("sync", ["direct", "reshard"])
def test_sigkill_then_drop_then_shrink(cluster: MakeCluster, sync: str) -> None:
    run, reference = start(cluster, sync=sync)
    go_on(run, reference)
    members = run.plan.members()
    run.call({"r0/2": ("trap", "before_sync", "kill")})
    run.send(dict.fromkeys(members, ("steps", 1)))
    assert run.collect(["r0/2"])["r0/2"][0] == "died"
    left = [gpu for gpu in members if gpu != "r0/2"]
    run.abort(left)
    answers = run.collect(left)
    assert {value[0] for _, value in answers.values()} == {"GenerationAborted"}
    standings = run.call(dict.fromkeys(left, ("standing",)))
    assert {standing.applied_step for standing in standings.values()} == {2}
    holes = without(home_holders(GQA, 4), [2])
    dropped = [Part((0, 1, 3), 0, mode="standby", holders=holes), Part(ALL, 7)]
    run.enter(run.make_plan(dropped, sources=survivors_sources(run, dead=["r0/2"]), applied_step=2))
    go_on(run, reference)
    before = unit_states(run)
    run.enter(run.make_plan([Part((0, 1, 3), 3), Part(ALL, 4)], applied_step=4))
    assert_same_units(before, unit_states(run))
    go_on(run, reference)
    run.replace("r0/2")
    run.enter(run.make_plan(WHOLE, applied_step=6))
    go_on(run, reference)


@pytest.mark.parametrize("point", ["after_forward", "before_commit"])
def test_abort_before_the_commit_drops_the_step_everywhere(
    cluster: MakeCluster, point: str
) -> None:
    run, reference = start(cluster)
    go_on(run, reference)
    members = run.plan.members()
    run.call({"r1/3": ("trap", point, "hold")})
    run.send(dict.fromkeys(members, ("steps", 1)))
    run.await_trap("r1/3")
    assert run.phase("r1/3") == "compute"
    deadline = time.monotonic() + DEADLINE_S
    while run.phase("r0/0") == "compute" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert run.phase("r0/0") == ("collective" if point == "after_forward" else "commit")
    run.abort(members)
    assert {kind for kind, _ in (v for _, v in run.collect(members).values())} == {
        "GenerationAborted"
    }
    standings = run.everyone("standing").values()
    assert {standing.applied_step for standing in standings} == {2}
    run.enter(run.make_plan(WHOLE, sources=survivors_sources(run), applied_step=2))
    go_on(run, reference)


def test_roll_forward_when_some_rank_has_applied(cluster: MakeCluster) -> None:
    run, reference = start(cluster)
    go_on(run, reference)
    members = run.plan.members()
    run.call({"r0/1": ("trap", "before_apply", "hold"), "r1/0": ("trap", "after_commit", "hold")})
    run.send(dict.fromkeys(members, ("steps", 1)))
    run.await_trap("r0/1")
    run.await_trap("r1/0")
    run.abort(members)
    run.collect(members)
    standings = run.everyone("standing")
    assert {gpu for gpu, s in standings.items() if s.applied_step == 2} == {"r0/1", "r1/0"}
    assert standings["r0/1"].synced
    assert standings["r1/0"].synced
    _, norm = reference.step()
    assert standings["r0/0"].grad_norm == pytest.approx(norm, rel=1e-10)
    roll = RollForward(step=2, grad_norm=standings["r0/0"].grad_norm)
    run.enter(
        run.make_plan(
            [Part((0, 1, 2), 3), Part(ALL, 4)],
            sources=survivors_sources(run),
            applied_step=3,
            roll_forward=roll,
        )
    )
    assert {s.grad_norm for s in run.everyone("standing").values()} == {roll.grad_norm}
    assert_same_params(run, reference, atol=1e-9)
    go_on(run, reference)


def test_abort_between_the_swaps_of_two_ranks(cluster: MakeCluster) -> None:
    run, reference = start(cluster)
    go_on(run, reference)
    before = unit_states(run)
    old = survivors_sources(run)
    shrunk = run.make_plan([Part((0, 1, 3), 3), Part(ALL, 4)], applied_step=2)
    members = shrunk.members()
    run.call({"r0/1": ("trap", "move.before_swap", "hold")})
    run.send(dict.fromkeys(members, ("enter", shrunk)))
    run.await_trap("r0/1")
    others = [gpu for gpu in members if gpu != "r0/1"]
    assert {verdict for verdict, _ in run.collect(others).values()} == {"done"}
    run.abort(members)
    assert run.collect(["r0/1"])["r0/1"][1][0] == "GenerationAborted"
    standings = run.call(dict.fromkeys(members, ("standing",)))
    assert standings["r0/1"].layout_generation == run.plan.generation
    assert standings["r0/0"].layout_generation == shrunk.generation
    run.plan = shrunk
    sources = survivors_sources(run) | {"r0/1": old["r0/1"]}
    run.enter(run.make_plan([Part((0, 1, 3), 3), Part(ALL, 4)], sources=sources, applied_step=2))
    assert_same_units(before, unit_states(run))
    go_on(run, reference)


def test_a_member_that_does_not_come(cluster: MakeCluster) -> None:
    run, reference = start(cluster)
    again = run.make_plan(WHOLE)
    members = again.members()
    run.call({"r1/1": ("trap", "enter.groups", "hold")})
    run.send(dict.fromkeys(members, ("enter", again)))
    run.await_trap("r1/1")
    run.abort(members)
    assert {v[0] for _, v in run.collect(members).values()} == {"GenerationAborted"}
    run.enter(run.make_plan(WHOLE, sources=survivors_sources(run)))
    go_on(run, reference)


def test_ranks_with_different_plans_do_not_start(cluster: MakeCluster) -> None:
    run, _ = start(cluster)
    plan = run.make_plan(WHOLE)
    other = msgspec.structs.replace(plan, applied_step=1)
    run.send({gpu: ("enter", other if gpu == "r1/0" else plan) for gpu in plan.members()})
    assert {v[0] for _, v in run.collect(plan.members()).values()} == {"DigestMismatch"}


def test_a_rank_on_another_step_is_refused(cluster: MakeCluster) -> None:
    run, _ = start(cluster)
    with pytest.raises(RankFailed, match="applied step of r0/0 is 0, not 1"):
        run.enter(run.make_plan(WHOLE, applied_step=1))


@pytest.mark.parametrize("family", ["attention", "kv", "mlp", "vocab", "replicated"])
def test_a_change_in_one_copy_is_noticed(cluster: MakeCluster, family: str) -> None:
    run, _ = start(cluster)
    run.call({"r0/0": ("damage", family)})
    run.everyone("steps", 1)
    for (result,) in run.everyone("steps", 1).values():
        assert result.hash_ok is False
        assert result.difference.units[0][0] == family
        assert 0 in {*result.difference.odd, *result.difference.unsure}


def test_the_odd_one_of_three_fetches_from_the_others(cluster: MakeCluster) -> None:
    """With a majority it is known who is wrong; entering without its state mends it."""
    run = cluster(small_config(GQA), [4, 4, 2])
    parts = [Part(ALL, 3), Part((0, 2, 3), 3), Part((0, 1), 1)]
    run.enter(run.make_plan(parts))
    members = run.plan.members()  # type: ignore[union-attr]
    run.everyone("steps", 1)
    run.call({"r1/2": ("damage", "vocab")})
    (found,) = {r.difference for (r,) in run.everyone("steps", 1).values()}
    assert ([members[rank] for rank in found.odd], found.unsure) == (["r1/2"], ())
    before = unit_states(run, trusted=set(members) - {"r1/2"})
    sources = survivors_sources(run, dead=["r1/2"])
    run.enter(run.make_plan(parts, sources=sources, applied_step=2))
    assert_same_units(before, unit_states(run))
    last = [results[-1] for results in run.everyone("steps", 2).values()]
    assert all(result.hash_ok for result in last)


def test_of_two_copies_it_is_not_known_which_is_right(cluster: MakeCluster) -> None:
    run, _ = start(cluster)
    members = run.plan.members()  # type: ignore[union-attr]
    run.everyone("steps", 1)
    run.call({"r1/2": ("damage", "vocab")})
    (found,) = {r.difference for (r,) in run.everyone("steps", 1).values()}
    assert found.odd == ()
    assert "r1/2" in [members[rank] for rank in found.unsure]


def test_parameters_that_are_not_finite_move_nothing(cluster: MakeCluster) -> None:
    run, _ = start(cluster)
    run.call({"r1/2": ("damage", "mlp", float("nan"))})
    members = run.plan.members()  # type: ignore[union-attr]
    for (result,) in run.everyone("steps", 1).values():
        assert result.grad_norm == NOT_FINITE
        assert result.not_finite.where == "the parameters"
        assert [members[rank] for rank in result.not_finite.ranks] == ["r1/2"]
