"""A step that is not finite moves nothing on any rank, and its place is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from runtime.engine.reference import Reference
from runtime.plan.generation import NOT_FINITE, RollForward
from tests.support.engine_checks import (
    GQA,
    assert_same_params,
    assert_same_steps,
    small_config,
    unit_states,
)
from tests.support.engine_pool import Part, RankFailed
from tests.support.engine_threads import ThreadCluster

MIXED = [Part((0, 1, 2, 3), 4), Part((0, 2, 3), 3)]


@pytest.fixture
def threads() -> Iterator[Callable[..., ThreadCluster]]:
    made: list[ThreadCluster] = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def make(**train: Any) -> ThreadCluster:
        config = small_config(GQA, sync=train.pop("sync", "direct"))
        train = {"warmup_steps": 0, **train}
        config = msgspec.structs.replace(
            config, train=msgspec.structs.replace(config.train, **train)
        )
        made.append(ThreadCluster(config, [4, 4]))
        made[-1].enter(made[-1].make_plan(MIXED))
        return made[-1]

    yield make
    for each in made:
        each.close()
    torch.set_num_threads(before)


@pytest.mark.parametrize("sync", ["direct", "reshard"])
def test_a_step_that_stays_so_is_skipped_everywhere(
    threads: Callable[..., ThreadCluster], sync: str
) -> None:
    run = threads(sync=sync)
    reference = Reference(run.config, dtype=torch.float64)
    assert_same_steps(run.everyone("steps", 2), reference, rtol=1e-11)
    before = unit_states(run)
    run.call({"r1/2": ("spoil", 2, 1)})
    spoilt = run.plan.members().index("r1/2")  # type: ignore[union-attr]
    for (result,) in run.everyone("steps", 1).values():
        assert result.step == 2
        assert result.grad_norm == NOT_FINITE
        assert not math.isfinite(result.loss)
        assert result.not_finite.ranks == (spoilt,)
        assert result.not_finite.where == "the MLP of layer 1"
        assert result.not_finite.again
    for key, state in unit_states(run).items():
        assert (state == before[key]).all(), key
    reference.skip()
    steps = run.everyone("steps", 3)
    assert all(result.not_finite is None for by_rank in steps.values() for result in by_rank)
    assert_same_steps(steps, reference, rtol=1e-11)
    assert_same_params(run, reference, atol=1e-9)


def test_a_passing_fault_costs_a_second_run_only(threads: Callable[..., ThreadCluster]) -> None:
    run = threads()
    reference = Reference(run.config, dtype=torch.float64)
    assert_same_steps(run.everyone("steps", 1), reference, rtol=1e-11)
    run.call({"r1/2": ("spoil", 1, 0)})
    steps = run.everyone("steps", 2)
    assert_same_steps(steps, reference, rtol=1e-11)
    for first, second in steps.values():
        assert second.not_finite is None
        assert not first.not_finite.again
        assert first.not_finite.where == "the loss"
        # The loss is the replica's: one of its slots it was.
        members = run.plan.members()  # type: ignore[union-attr]
        assert {members[r] for r in first.not_finite.ranks} == {"r1/0", "r1/2", "r1/3"}
    assert_same_params(run, reference, atol=1e-9)


def test_gradients_alone_are_seen(threads: Callable[..., ThreadCluster]) -> None:
    """A weight so large that its own loss is finite and its gradient is not."""
    run = threads()
    run.call({"r0/1": ("spoil_gradient",)})
    for (result,) in run.everyone("steps", 1).values():
        assert result.grad_norm == NOT_FINITE
        assert result.not_finite.again
        assert [run.plan.members()[r] for r in result.not_finite.ranks] == ["r0/1"]  # type: ignore[union-attr]
        assert result.not_finite.where == "the gradient of down of layer 1"


def test_stop_leaves_the_state_before_the_step(threads: Callable[..., ThreadCluster]) -> None:
    run = threads(non_finite="stop")
    run.everyone("steps", 1)
    before = unit_states(run)
    run.call({"r0/3": ("spoil", 2, 0)})
    with pytest.raises(RankFailed) as caught:
        run.everyone("steps", 1)
    assert caught.value.kind == "NonFiniteError"
    assert "first the MLP of layer 0" in str(caught.value)
    assert {s.applied_step for s in run.everyone("standing").values()} == {1}
    assert not any(s.synced for s in run.everyone("standing").values())
    for key, state in unit_states(run).items():
        assert (state == before[key]).all(), key


def test_a_rank_that_missed_the_skip_skips_on_entering(
    threads: Callable[..., ThreadCluster],
) -> None:
    run = threads()
    reference = Reference(run.config, dtype=torch.float64)
    assert_same_steps(run.everyone("steps", 1), reference, rtol=1e-11)
    run.call({"r1/2": ("spoil", 2, 0)})
    held = run.ranks["r0/1"]
    held.trap("before_apply", "hold")
    held.on_trap = held.abort_event.set
    assert run.plan is not None
    assert list(run.errors(dict.fromkeys(run.plan.members(), ("steps", 1)))) == ["r0/1"]
    standings = run.everyone("standing")
    assert standings["r0/0"].grad_norm == NOT_FINITE
    assert (standings["r0/1"].applied_step, standings["r0/0"].applied_step) == (1, 2)
    roll = RollForward(step=1, grad_norm=standings["r0/0"].grad_norm)
    run.enter(run.make_plan(MIXED, applied_step=2, roll_forward=roll))
    reference.skip()
    assert_same_params(run, reference, atol=1e-9)
    assert_same_steps(run.everyone("steps", 2), reference, rtol=1e-11)
