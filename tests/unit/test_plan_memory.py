"""What a slot needs of its GPU's memory, against what the engine really keeps, and who asks."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from runtime.cli import cli
from runtime.config import ClusterConfig, Config, ModelConfig, RackConfig, TrainConfig
from runtime.engine.engine import Engine
from runtime.errors import ConfigError, PlanError
from runtime.layout.takeover import home_holders, takeover
from runtime.layout.units import held_units
from runtime.plan.memory import USABLE, largest, misfit, require_fit, slot_memory, token_bytes
from runtime.plan.planner import compare, leave_out
from tests.support.engine_checks import ONE_GPU
from tests.support.engine_layouts import mixed_plan
from tests.unit.test_plan_planner import situation

BATCH, SEQ_LEN = 4, 32


def model(num_kv_heads: int) -> ModelConfig:
    return ModelConfig(
        num_layers=3,
        hidden=64,
        num_query_heads=8,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        mlp_hidden=176,
        mlp_block=8,
    )


@pytest.mark.parametrize("num_kv_heads", [2, 8])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_forward_keeps_is_what_is_predicted(
    num_kv_heads: int, precision: str, recompute: bool, dropout: float
) -> None:
    train = TrainConfig(
        seq_len=SEQ_LEN, global_batch=BATCH, micro_batch=BATCH, dropout=dropout,
        precision=precision, activation_checkpointing=recompute,
    )  # type: ignore[arg-type]  # fmt: skip
    config = Config(model=model(num_kv_heads), train=train, cluster=ONE_GPU)
    engine = Engine(config, "r0/0", abort=threading.Event())
    engine.enter(mixed_plan(config.model, [1], [[0]]))
    assert engine.state is not None
    assert engine.stepper.model is not None
    own = engine.state.params.untyped_storage().data_ptr()
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.stepper.model.loss(torch.zeros(BATCH, SEQ_LEN + 1, dtype=torch.int64), 0, 0)
    # The copies of the parameters in bfloat16 are told apart by their shapes.
    held = held_units(config.model, home_holders(config.model, 1), 0)
    copies = 0
    if precision == "bf16":
        embed = config.model.vocab * config.model.hidden
        matrices = engine.state.layout.matrices
        copies = 2 * (embed if recompute else matrices)
    measured = sum(storage.nbytes() for storage in kept.values()) - copies
    predicted = BATCH * SEQ_LEN * token_bytes(config.model, train, held).kept
    assert predicted == pytest.approx(measured, rel=0.03)


def test_state_is_what_the_engine_allocates() -> None:
    config = Config(model=model(2), train=TrainConfig(), cluster=ONE_GPU)
    engine = Engine(config, "r0/0", abort=threading.Event())
    engine.enter(mixed_plan(config.model, [4], [[0]]))
    state = engine.state
    assert state is not None
    held = state.layout.held
    memory = slot_memory(config.model, config.train, held, num_replicas=2, num_samples=0)
    allocated = sum(flat.untyped_storage().nbytes() for flat in (*state.moving(), state.grads))
    assert memory.state == pytest.approx(allocated, rel=0.01)
    assert memory.activations == 0


def test_a_reduced_slot_holds_more_in_proportion_and_its_old_layout_while_state_moves() -> None:
    config = Config()
    home = home_holders(config.model, 8)
    seven = takeover(config.model, home, home, tuple(range(7)))
    whole = largest(config, home, tuple(range(8)), 8, home).memory
    reduced = largest(config, seven, tuple(range(7)), 8, home).memory
    assert reduced.state / whole.state == pytest.approx(8 / 7, rel=0.06)
    assert whole.moving == 0
    arriving = (reduced.state - whole.state) * 3 // 4
    assert reduced.moving == pytest.approx(whole.state + arriving, rel=0.06)


def test_recomputing_and_smaller_micro_batches_need_less() -> None:
    def activations(**train: object) -> int:
        deep = ModelConfig(num_layers=32)
        config = Config(model=deep, train=msgspec.structs.replace(TrainConfig(), **train))
        home = home_holders(config.model, 8)
        return largest(config, home, tuple(range(8)), 8, home).memory.activations

    assert activations(activation_checkpointing=True) < activations() / 2
    assert activations(micro_batch=2) == pytest.approx(activations() / 4, rel=0.01)
    assert activations(micro_batch=100) == activations(), "no more than its samples"


def limited(gigabytes: float) -> Config:
    config = Config()
    cluster = msgspec.structs.replace(config.cluster, gpu_memory_gb=gigabytes)
    return msgspec.structs.replace(config, cluster=cluster)


def between() -> float:
    """Gigabytes that hold a whole replica and none of 7 slots."""
    config = Config()
    home = home_holders(config.model, 8)
    whole = situation(dead={0: (3,)})
    live = (0, 1, 2, 4, 5, 6, 7)
    seven = whole.layout(whole.replicas[0], live)
    sizes = [
        largest(config, layout, slots, 8, home).memory.peak
        for layout, slots in ((home, tuple(range(8))), (seven, live))
    ]
    assert sizes[0] < sizes[1]
    return sum(sizes) / 2 / 1e9 / USABLE


def test_what_does_not_fit_is_not_offered_and_says_why() -> None:
    broken = situation(dead={0: (3,)})
    assert compare(broken, 0).choice.kind in ("shrink", "shrink_boost")
    tight = msgspec.structs.replace(broken, config=limited(between()))
    found = compare(tight, 0)
    for option in found.options:
        if option.kind in ("shrink", "shrink_boost"):
            assert not option.feasible
            assert "replica 0 does not fit: slot " in option.reason
            assert "set train.activation_checkpointing" in option.reason
            assert f"of its {between():g} GB" in option.reason
    assert found.choice.kind not in ("shrink", "shrink_boost")
    assert found.choice.feasible


def test_a_takeover_that_nobody_asked_for_must_fit_too() -> None:
    broken = situation(dead={0: (3,), 1: (2,)})
    assert [target.mode for target in leave_out(broken)] == ["training", "training"]
    tight = msgspec.structs.replace(broken, config=limited(between()))
    with pytest.raises(PlanError, match="no replica can go on: replica 0 does not fit: slot"):
        leave_out(tight)


def test_unknown_memory_refuses_nothing() -> None:
    config = limited(0.0)
    home = home_holders(config.model, 8)
    assert misfit(config, largest(config, home, tuple(range(8)), 8, home)) == ""
    assert require_fit(config) is config


def test_a_run_that_does_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[cluster]\ngpu_memory_gb = 0.001\n")
    result = CliRunner().invoke(cli, ["up", "--config", str(path)])
    assert isinstance(result.exception, ConfigError)
    told = "`cluster.gpu_memory_gb` is 0.001; rack-0 with 8 GPUs does not fit: slot"
    assert told in str(result.exception)


def test_one_rack_sends_nothing_to_others() -> None:
    cluster = ClusterConfig(racks=(RackConfig(name="r", gpus=4),))
    home = home_holders(ModelConfig(), 4)
    memory = largest(Config(cluster=cluster), home, (0, 1, 2, 3), 16, home).memory
    assert memory.sync == 0
