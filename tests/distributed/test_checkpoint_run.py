"""Checkpoints of a real run while it trains, and runs that begin with one."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from runtime.config import CheckpointConfig, Config
from runtime.engine.checkpoint import checkpoints_by_age, read_full, read_manifest
from runtime.engine.hugging_face import export_llama
from runtime.engine.llama_import import import_llama
from runtime.engine.reference import Reference
from runtime.engine.resume import Beginning, find_start
from runtime.plan.manifest import Start
from storage.records import LedgerSpent, StepCommitted
from tests.support.control_run import run_config, trial

pytestmark = pytest.mark.timeout(120)


def test_written_while_it_trains_pruned_and_equal_to_the_reference(tmp_path: Path) -> None:
    config = msgspec.structs.replace(
        run_config(2, 1, step_s=0.1), checkpoint=CheckpointConfig(every_steps=4, keep=2)
    )
    home = tmp_path / "runs" / "r1"
    home.mkdir(parents=True)
    folder = home / "checkpoint"

    def sealed() -> list[Path]:
        return checkpoints_by_age([*folder.iterdir()]) if folder.exists() else []

    with trial(config, home) as made:
        made.until(lambda: bool(sealed()), "a checkpoint")
        first = sealed()[0]
        made.kill("rack-0/1")
        made.left_out(0)
        made.until(lambda: first not in sealed() and bool(sealed()), "the first to be let go")
        assert not made.run.controller.coordinator.ended
        made.run.controller.ask_stop("at once")
        made.run.controller.ask_stop("at once")
        made.run.join(30.0)
    made.check()
    spans = [e for e in made.journal() if isinstance(e, LedgerSpent)]
    assert any(span.bucket == "checkpointing" for span in spans)
    assert len(sealed()) <= 2
    manifests = [read_manifest(path) for path in sealed()]
    assert all(one.next_sample == 12 * one.applied_step for one in manifests)
    assert all(sum(one.ledger.values()) > 0 for one in manifests)
    written = [event.message for event in made.events("checkpoint_written")]
    assert f"checkpoint at step {manifests[0].applied_step}: " in written[-1]
    assert "training stood still" in written[0]
    reference = Reference(config)
    for path in reversed(sealed()):
        manifest = read_manifest(path, verify=True)
        while reference.step_number < manifest.applied_step:
            reference.step()
        _, full = read_full(path, config.model)
        for (name, layer), tensor in reference.params.items():
            assert full[f"{name}.{layer}"].numpy() == pytest.approx(
                tensor.detach().numpy(), abs=2e-4
            )
    start, word, _ = find_start(config, tmp_path / "runs")
    assert start.step == read_manifest(sealed()[0]).applied_step
    assert "continues run" in word


def with_train(config: Config, **settings: int) -> Config:
    train = msgspec.structs.replace(config.train, **settings)
    return msgspec.structs.replace(config, train=train)


def test_a_run_trains_from_imported_weights(tmp_path: Path) -> None:
    config = run_config(2, 3, step_s=0.05, steps=8)
    others = Reference(with_train(config, seed=7)).params
    weights = {f"{name}.{layer}": t.detach() for (name, layer), t in others.items()}
    export_llama(tmp_path / "llama", config.model, weights, config.train.seq_len)
    import_llama(tmp_path / "llama", tmp_path / "begin", mlp_block=8, vocab_block=8)
    config = msgspec.structs.replace(
        config, checkpoint=CheckpointConfig(start=str(tmp_path / "begin"))
    )
    home = tmp_path / "runs" / "r1"
    home.mkdir(parents=True)
    begin = find_start(config, tmp_path / "runs")

    def reference() -> Reference:
        found = Reference(config)
        with torch.no_grad():
            for key, tensor in found.params.items():
                tensor.copy_(others[key])
        return found

    told = begin._replace(damaged="another one is damaged")
    with trial(config, home, begin=told) as made:
        made.make_reference = reference
        made.run.join(30.0)
    made.check()
    assert made.events("checkpoint_damaged")[0].message == told.damaged
    assert made.events("run_continued")[0].message == begin.word
    # What it leaves is its own: the next run goes on from that.
    start, word, _ = find_start(with_train(config, steps=0), home.parent)
    assert (start.step, "continues run" in word) == (8, True)


def test_damage_after_it_was_chosen_is_met_by_the_ranks_and_costs_no_process(
    tmp_path: Path,
) -> None:
    config = msgspec.structs.replace(
        run_config(2, 1, step_s=0.1, steps=18), checkpoint=CheckpointConfig(every_steps=4, keep=2)
    )
    first, second = tmp_path / "runs" / "r1", tmp_path / "r2"
    for home in (first, second):
        home.mkdir(parents=True)
    with trial(config, first) as made:
        made.run.join(30.0)
    shutil.copytree(first / "checkpoint", second / "checkpoint")
    config = with_train(config, steps=22)
    newest, older = checkpoints_by_age([*(second / "checkpoint").iterdir()])
    begin = Beginning(Start(checkpoint=str(newest), run="r1", step=18))
    part = next(newest.glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with trial(config, second, begin=begin) as made:
        made.run.join(30.0)
    assert "its checksum differs" in made.events("run_rolled_back")[0].message
    assert newest.with_name(f"damaged-{newest.name}").is_dir()
    assert not made.events("gpu_failed")
    step = read_manifest(older).applied_step
    steps = [entry for entry in made.journal() if isinstance(entry, StepCommitted)]
    assert [one.step for one in steps] == list(range(step, 22))
    undisturbed = made._undisturbed(22)[step:]
    assert [one.loss for one in steps] == pytest.approx(undisturbed, rel=1e-4)
