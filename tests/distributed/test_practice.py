"""Dropout, activation checkpointing and bfloat16 on any shape, against one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from runtime.config import Config, ModelConfig
from runtime.engine import engine as engine_module
from runtime.engine.engine import Engine
from runtime.engine.model import SlotModel
from runtime.engine.reference import Reference
from runtime.engine.state import State
from tests.support.engine_checks import (
    GQA,
    ODD,
    UNTIED,
    assert_same_params,
    assert_same_steps,
    small_config,
    unit_states,
)
from tests.support.engine_layouts import mixed_plan
from tests.support.engine_pool import Cluster, Part
from tests.support.engine_threads import ThreadCluster

MakeCluster = Callable[..., Cluster]
ALL = (0, 1, 2, 3)
MIXED = [Part(ALL, 4), Part((0, 2, 3), 3)]
SHAPES: list[Any] = [
    pytest.param(GQA, [4, 4], MIXED, id="4+3"),
    pytest.param(UNTIED, [4, 4, 4], [Part(ALL, 3), Part((1, 2, 3), 3), Part((3,), 1)], id="4+3+1"),
]


def config(
    model: ModelConfig, sync: Any = "direct", fractional: Any = "off", **train: Any
) -> Config:
    base = small_config(model, sync=sync, fractional=fractional)
    return msgspec.structs.replace(base, train=msgspec.structs.replace(base.train, **train))


@pytest.mark.parametrize("sync", ["direct", "reshard"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("model", "slots", "parts"), SHAPES)
def test_dropout_is_that_of_one_process(
    cluster: MakeCluster, model: Any, slots: list[int], parts: Any, recompute: bool, sync: Any
) -> None:
    run = cluster(config(model, sync, dropout=0.2, activation_checkpointing=recompute), slots)
    run.enter(run.make_plan(parts))
    reference = Reference(run.config, dtype=torch.float64)
    assert_same_steps(run.everyone("steps", 4), reference, rtol=1e-11)
    assert_same_params(run, reference, atol=1e-9)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_dropout_where_slots_share_units_and_through_a_shrink(
    cluster: MakeCluster, recompute: bool
) -> None:
    settings = config(
        ODD, fractional="on", dropout=0.2, activation_checkpointing=recompute, micro_batch=3
    )
    run = cluster(settings, [4, 4])
    reference = Reference(run.config, dtype=torch.float64)
    run.enter(run.make_plan([Part(ALL, 4), Part(ALL, 3)]))
    assert_same_steps(run.everyone("steps", 2), reference, rtol=1e-11)
    run.enter(run.make_plan([Part(ALL, 5), Part((0, 1, 3), 2)], applied_step=2))
    assert_same_steps(run.everyone("steps", 2), reference, rtol=1e-11)
    assert_same_params(run, reference, atol=1e-9)


def test_dropout_drops() -> None:
    plain, dropped = (Reference(config(GQA, dropout=rate)).step() for rate in (0.0, 0.2))
    assert plain != dropped


@pytest.mark.parametrize("sync", ["direct", "reshard"])
@pytest.mark.parametrize("fractional", ["off", "on"])
def test_recomputing_changes_no_bit(cluster: MakeCluster, sync: Any, fractional: Any) -> None:
    found = []
    for recompute in (False, True):
        settings = config(ODD, sync, fractional, activation_checkpointing=recompute, dropout=0.1)
        run = cluster(settings, [4, 4], dtype="float32")
        run.enter(run.make_plan(MIXED))
        steps = run.everyone("steps", 3)
        found.append((next(iter(steps.values())), unit_states(run)))
    (steps_kept, kept), (steps_again, again) = found
    assert [(s.loss, s.grad_norm) for s in steps_kept] == [
        (s.loss, s.grad_norm) for s in steps_again
    ]
    assert kept.keys() == again.keys()
    assert all((kept[key] == again[key]).all() for key in kept)


def test_recomputing_keeps_the_residual_stream_only() -> None:
    """Elements that forward keeps for backward, with and without."""
    kept = {}
    for recompute in (False, True):
        held: list[int] = []

        def pack(tensor: torch.Tensor, held: list[int] = held) -> torch.Tensor:
            held.append(tensor.untyped_storage().nbytes())
            return tensor

        model = _alone(config(GQA, activation_checkpointing=recompute))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.loss(torch.zeros(4, 17, dtype=torch.int64), 0, 0).backward()
        kept[recompute] = sum(held)
    assert kept[True] < kept[False] / 2


def _alone(settings: Config) -> SlotModel:
    engine = Engine(settings, "r0/0", abort=threading.Event(), dtype=torch.float64)
    engine.enter(mixed_plan(settings.model, [1], [[0]]))
    model = engine.stepper.model
    assert model is not None
    return model


# Measured: loss 7e-4 from fp32 and 3e-4 between shapes, gradient norm 4e-3.
LOSS_RTOL, SHAPES_RTOL, NORM_RTOL = 2e-3, 1e-3, 1e-2


@pytest.mark.parametrize(("sync", "recompute"), [("direct", False), ("reshard", True)])
def test_bfloat16_is_near_fp32_on_any_shape(
    cluster: MakeCluster, sync: Any, recompute: bool
) -> None:
    settings = config(GQA, sync, precision="bf16", activation_checkpointing=recompute)
    reference = Reference(settings)
    losses, norms = zip(*(reference.step() for _ in range(10)), strict=True)
    curves: list[list[float]] = []
    for parts in ([Part(ALL, 4), Part(ALL, 3)], MIXED, [Part((1,), 3), Part((0, 1), 4)]):
        run = cluster(settings, [4, 4], dtype="float32")
        run.enter(run.make_plan(parts))
        results = run.everyone("steps", 10)
        assert all(r.hash_ok is not False for steps in results.values() for r in steps)
        mine = next(iter(results.values()))
        curves.append([step.loss for step in mine])
        assert curves[-1] == pytest.approx(list(losses), rel=LOSS_RTOL)
        assert curves[-1] == pytest.approx(curves[0], rel=SHAPES_RTOL)
        assert [step.grad_norm for step in mine] == pytest.approx(list(norms), rel=NORM_RTOL)
        assert curves[-1] != pytest.approx(list(losses), rel=1e-6), "it was not in bfloat16"


def test_bfloat16_keeps_parameters_gradients_and_sums_in_fp32() -> None:
    settings = config(GQA, precision="bf16")
    engine = Engine(settings, "r0/0", abort=threading.Event())
    engine.enter(mixed_plan(GQA, [1], [[0]]))
    state, model = engine.state, engine.stepper.model
    assert state is not None
    assert model is not None
    summed: set[torch.dtype] = set()
    model.probe = SimpleNamespace(  # type: ignore[assignment]
        block=lambda layer, block, partial: summed.add(partial.dtype),
        loss=lambda loss: summed.add(loss.dtype),
    )
    model.loss(torch.zeros(2, 17, dtype=torch.int64), 0, 0).backward()
    assert summed == {torch.float32}
    assert {flat.dtype for flat in (*state.moving(), state.grads)} == {torch.float32}
    assert state.grads.abs().sum() > 0


@pytest.mark.parametrize("sync", ["direct", "reshard"])
@pytest.mark.parametrize("no_decay", [(), ("norms", "embedding", "head")], ids=["all", "matrices"])
@pytest.mark.parametrize("model", [GQA, UNTIED], ids=["tied", "untied"])
def test_decay_groups_clipping_accumulation_and_cosine(
    cluster: MakeCluster, model: Any, no_decay: tuple[str, ...], sync: Any
) -> None:
    """A clip that bites, several micro-batches a replica, and a cosine that ends within the run."""
    settings = config(
        model,
        sync,
        no_decay=no_decay,
        weight_decay=0.5,
        clip_norm=0.2,
        micro_batch=1,
        warmup_steps=1,
        decay_tokens=5 * 7 * 16,
        min_lr=1e-4,
    )
    run = cluster(settings, [4, 4])
    run.enter(run.make_plan(MIXED))
    reference = Reference(settings, dtype=torch.float64)
    results = run.everyone("steps", 7)
    assert all(r.grad_norm > 0.2 for steps in results.values() for r in steps)
    assert_same_steps(results, reference, rtol=1e-11)
    assert_same_params(run, reference, atol=1e-9)


def test_decay_is_not_for_the_groups_that_are_named() -> None:
    after = []
    for no_decay in (("norms",), ("norms", "embedding", "head")):
        reference = Reference(config(UNTIED, weight_decay=0.5, no_decay=no_decay))
        reference.step()
        after.append({key: rows.detach() for key, rows in reference.params.items()})
    one, other = after
    assert {key[0] for key in one if not torch.equal(one[key], other[key])} == {"embed", "head"}


def test_a_rank_whose_layout_stays_makes_no_second_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is as full as it may be there is no room for one."""
    run = ThreadCluster(config(GQA), [4, 4])
    reference = Reference(run.config, dtype=torch.float64)
    made: list[str] = []

    class Counted(State):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            made.append(threading.current_thread().name)
            super().__init__(*arguments, **keywords)

    try:
        run.enter(run.make_plan([Part(ALL, 4), Part(ALL, 3)]))
        assert_same_steps(run.everyone("steps", 2), reference, rtol=1e-11)
        monkeypatch.setattr(engine_module, "State", Counted)
        run.enter(run.make_plan(MIXED, applied_step=2))
        assert sorted(made) == ["r1/0", "r1/2", "r1/3"]
        assert_same_steps(run.everyone("steps", 2), reference, rtol=1e-11)
        assert_same_params(run, reference, atol=1e-9)
    finally:
        run.close()
