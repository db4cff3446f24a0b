"""Any shape reads what any shape wrote, bit for bit: whole, reduced, sharing units, standing by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from runtime.engine.checkpoint import read_manifest, seal
from runtime.engine.reference import Reference
from runtime.layout.units import rota, without
from runtime.plan.manifest import Manifest
from tests.support.engine_checks import (
    ODD,
    assert_same_params,
    assert_same_steps,
    assert_same_units,
    small_config,
    unit_states,
)
from tests.support.engine_pool import Cluster, Part

MakeCluster = Callable[..., Cluster]
# Nothing divides its units; the head stands apart from the embedding.
MODEL = msgspec.structs.replace(ODD, tied=False)
STEPS = 3


def shared(run: Cluster) -> list[Part]:
    return [Part((0, 1, 3), 3), Part((0, 1, 2, 3), 4)]


def shared_and_standby(run: Cluster) -> list[Part]:
    """Of slots that shared units one is gone: the others stand by with what they hold."""
    holes = without(run.layouts()[0], [1])
    return [Part((0, 3), 0, "standby", holes), Part((0, 1, 2, 3), 7)]


def whole(run: Cluster) -> list[Part]:
    return [Part((0, 1, 2, 3), 4), Part((0, 1, 2, 3), 3)]


def two_shared(run: Cluster) -> list[Part]:
    return [Part((0, 1, 3), 4), Part((0, 1, 2), 3)]


def alone(run: Cluster) -> list[Part]:
    return [Part((), 0), Part((2,), 7)]


SHAPES = [shared, whole, two_shared, alone]


def write(run: Cluster, folder: Path) -> dict[Any, Any]:
    parts = run.everyone("save", folder)
    seal(
        folder,
        Manifest(
            run="r",
            applied_step=STEPS,
            model=run.config.model,
            train=run.config.train,
            parts=tuple(parts.values()),
        ),
    )
    read_manifest(folder, verify=True)
    return unit_states(run)


@pytest.mark.parametrize("writer", [shared, shared_and_standby, two_shared])
def test_any_shape_reads_any_shape(cluster: MakeCluster, tmp_path: Path, writer: Any) -> None:
    config = small_config(MODEL, fractional="on")
    run = cluster(config, [4, 4])
    run.enter(run.make_plan(shared(run)))
    run.everyone("steps", STEPS)
    if writer is not shared:
        run.enter(run.make_plan(writer(run), applied_step=STEPS))
    assert any(len(rota(layout, "attention")) > 1 for layout in run.layouts())
    written = write(run, tmp_path / "checkpoint")
    for reader in SHAPES:
        other = cluster(config, [4, 4])
        plan = other.make_plan(reader(other), applied_step=STEPS)
        plan = msgspec.structs.replace(plan, checkpoint=str(tmp_path / "checkpoint"))
        other.enter(plan)
        assert_same_units(written, unit_states(other))
        reference = Reference(config, dtype=torch.float64)
        for _ in range(STEPS):
            reference.step()
        assert_same_steps(other.everyone("steps", 2), reference, rtol=1e-11)
        assert_same_params(other, reference, atol=1e-9)
