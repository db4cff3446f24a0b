"""The engine's proofs in short, over ranks that are threads: what a defect must not get past.

Each raises when something is wrong. Together they take about a second.
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch

from runtime.config import Config
from runtime.engine.checkpoint import load_units, write_part
from runtime.engine.reference import Reference
from runtime.engine.state import State, StateLayout
from runtime.layout.units import held_units, parameters
from runtime.plan.generation import RollForward
from runtime.plan.manifest import Manifest
from tests.support.engine_checks import (
    ODD,
    assert_same_params,
    assert_same_units,
    small_config,
    unit_states,
)
from tests.support.engine_pool import Part
from tests.support.engine_threads import ThreadCluster

# A second is plenty for a command; a rank that waits for longer waits for nobody.
DEADLINE_S = 4.0
ALL = (0, 1, 2, 3)
MODEL = msgspec.structs.replace(ODD, num_layers=1, hidden=16, vocab_block=16)
# One head in turns: in a micro-batch of a single sample most of its sharers have nothing to do.
FEW_HEADS = msgspec.structs.replace(MODEL, num_query_heads=1, num_kv_heads=1)
IDLE = [Part((0, 2, 3), 5), Part(ALL, 2)]
MIXED = [Part(ALL, 4), Part((0, 2, 3), 3)]
UNIFORM = [Part(ALL, 4), Part(ALL, 3)]


class Proofs:
    """One cluster after another; `close` them all."""

    def __init__(self) -> None:
        self._made: list[ThreadCluster] = []

    def run(self, config: Config, parts: list[Part]) -> ThreadCluster:
        # Several buckets for every group, so that their order matters.
        train = msgspec.structs.replace(config.train, bucket_mb=0.002)
        config = msgspec.structs.replace(config, train=train)
        cluster = ThreadCluster(config, [4, 4], deadline_s=DEADLINE_S)
        self._made.append(cluster)
        cluster.enter(cluster.make_plan(parts))
        return cluster

    def close(self) -> None:
        for cluster in self._made:
            cluster.close()

    # ── what is proven ────────────────────────────────────────────────────────────────────────

    def every_row_meets_itself(self) -> None:
        """Ids instead of gradients: the sum of a row is its id times its holders."""
        for sync, fractional in (("direct", "off"), ("reshard", "on")):
            run = self.run(small_config(MODEL, 7, sync, fractional), MIXED)  # type: ignore[arg-type]
            sums = run.everyone("reduce_ids")
            holders = Counter(key for rows in sums.values() for key in rows)
            numbers = {(p.name, p.layer): n for n, p in enumerate(parameters(MODEL))}
            for rows in sums.values():
                for (name, layer, unit), row in rows.items():
                    first = numbers[name, layer] * 1_000_000 + unit * row.size + 1
                    ids = (first + np.arange(row.size)).reshape(row.shape)
                    np.testing.assert_array_equal(row, ids * holders[name, layer, unit])

    def the_trajectory_is_that_of_one_process(self) -> None:
        for sync, fractional in (("direct", "off"), ("reshard", "off"), ("direct", "on")):
            run = self.run(small_config(MODEL, 7, sync, fractional), MIXED)  # type: ignore[arg-type]
            go_on(run, Reference(run.config, dtype=torch.float64), 3)
        run = self.run(small_config(FEW_HEADS, 7, fractional="on"), IDLE)
        go_on(run, Reference(run.config, dtype=torch.float64), 2)

    def moves_keep_every_bit(self) -> None:
        run = self.run(small_config(MODEL), UNIFORM)
        reference = Reference(run.config, dtype=torch.float64)
        go_on(run, reference, 2)
        before = unit_states(run)
        run.enter(run.make_plan([Part((0, 1, 3), 3), Part(ALL, 4)], applied_step=2))
        assert_same_units(before, unit_states(run))
        go_on(run, reference, 2)
        before = unit_states(run)
        run.call({"r0/2": ("new", run.config, "r0/2", "float64")})
        run.enter(run.make_plan(UNIFORM, applied_step=4))
        assert_same_units(before, unit_states(run))
        assert run.layouts() == run.homes
        go_on(run, reference, 2)

    def a_pending_step_is_applied_once(self) -> None:
        """One rank is stopped between commit and apply; the next generation rolls it forward."""
        run = self.run(small_config(MODEL), UNIFORM)
        reference = Reference(run.config, dtype=torch.float64)
        go_on(run, reference, 2)
        held = run.ranks["r0/1"]
        held.trap("before_apply", "hold")
        held.on_trap = lambda: threading.Timer(0.2, held.abort_event.set).start()
        errors = run.errors(dict.fromkeys(run.plan.members(), ("steps", 1)))  # type: ignore[union-attr]
        assert list(errors) == ["r0/1"], errors
        standings = run.everyone("standing")
        assert {s.applied_step for gpu, s in standings.items() if gpu != "r0/1"} == {3}
        assert standings["r0/1"].applied_step == 2
        roll = RollForward(step=2, grad_norm=standings["r0/0"].grad_norm)
        run.enter(run.make_plan(MIXED, applied_step=3, roll_forward=roll))
        reference.step()
        assert_same_params(run, reference, atol=1e-9)
        unit_states(run)
        go_on(run, reference, 2)

    def a_checkpoint_gives_back_every_bit(self) -> None:
        run = self.run(small_config(MODEL), MIXED)
        run.everyone("steps", 2)
        before = unit_states(run)
        with TemporaryDirectory() as name:
            folder = Path(name)
            parts = [
                write_part(folder, gpu, run.ranks[gpu].engine.copy_part())
                for gpu in run.plan.members()  # type: ignore[union-attr]
            ]
            config = run.config
            manifest = Manifest(
                run="r", applied_step=2, model=MODEL, train=config.train, parts=tuple(parts)
            )
            for slot in range(4):
                layout = StateLayout(MODEL, held_units(MODEL, run.homes[1], slot))
                state = State(
                    layout, applied_step=2, device=torch.device("cpu"), dtype=torch.float64
                )
                load_units(folder, manifest, state)
                for key, value in state.units().items():
                    np.testing.assert_array_equal(before[key], value.numpy(), err_msg=str(key))

    def every(self) -> list[Any]:
        return [
            self.every_row_meets_itself,
            self.the_trajectory_is_that_of_one_process,
            self.moves_keep_every_bit,
            self.a_pending_step_is_applied_once,
            self.a_checkpoint_gives_back_every_bit,
        ]


def go_on(run: ThreadCluster, reference: Reference, count: int) -> None:
    """Steps like the reference's, of which every sample is taken once."""
    batch = run.config.train.global_batch
    for by_rank in zip(*run.everyone("steps", count).values(), strict=True):
        loss, norm = reference.step()
        step = reference.step_number - 1
        taken = {r.first_sample + i for r in by_rank for i in range(r.num_samples)}
        assert taken == set(range(step * batch, (step + 1) * batch)), "samples of the step"
        for result in by_rank:
            assert result.step == step
            np.testing.assert_allclose([result.loss, result.grad_norm], [loss, norm], rtol=1e-10)
            assert result.hash_ok is not False, "holders' states differ"
    assert_same_params(run, reference, atol=1e-9)


def caught_by() -> str:
    """Run all proofs; the name of the first that fails with its words, "" if none does."""
    proofs = Proofs()
    try:
        for proof in proofs.every():
            try:
                proof()
            except Exception as error:  # noqa: BLE001 (whatever a defect leads to)
                words = " ".join(str(error).split())
                return f"{proof.__name__}: {type(error).__name__}: {words[:90]}"
    finally:
        proofs.close()
    return ""
