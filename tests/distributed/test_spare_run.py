"""A hot spare of real processes takes a dead slot's place; the repaired GPU is the next spare."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from runtime.config import Config
from storage.live.memory import MemoryStore
from tests.support.control_run import run_config, trial

pytestmark = pytest.mark.timeout(120)


def with_spares(*gpus: int) -> Config:
    config = run_config(*gpus)
    racks = tuple(msgspec.structs.replace(rack, spares=1) for rack in config.cluster.racks)
    cluster = msgspec.structs.replace(config.cluster, racks=racks)
    return msgspec.structs.replace(config, cluster=cluster)


def test_two_failures_one_after_the_other_and_the_shape_stays_whole(tmp_path: Path) -> None:
    store = MemoryStore()
    config = with_spares(2, 2)
    with trial(config, tmp_path, store=store) as made:
        pids = made.drill.pids()
        assert "rack-0/2" in pids
        made.kill("rack-0/1")
        made.until(
            lambda: (p := made.open_for(0)) is not None and p.kind == "replace", "a proposal"
        )
        made.approve(0)
        assert made.shape() == [(0, 1), (0, 1)]
        assert made.coordinator.plan.replicas[0].gpus == ("rack-0/0", "rack-0/2")
        made.more_steps(2)
        made.repair("rack-0/1")
        made.until(lambda: made.coordinator.fleet.spares(0) == ("rack-0/1",), "the next spare")
        made.kill("rack-0/0")
        made.until(
            lambda: (p := made.open_for(0)) is not None and p.kind == "replace", "a proposal"
        )
        made.approve(0)
        assert made.coordinator.plan.replicas[0].gpus == ("rack-0/1", "rack-0/2")
        made.more_steps(2)
        survivors = {"rack-0/2", "rack-1/0", "rack-1/1", "rack-1/2"}
        now = made.drill.pids()
        assert {gpu: now[gpu] for gpu in survivors} == {gpu: pids[gpu] for gpu in survivors}

        def spare_idles() -> bool:
            record = store.get_racks(made.run.run)["rack-1"]
            idle_w = config.emulated.idle_w
            return bool(record.num_gpus == 3 and abs(record.column("power_w")[2] - idle_w) < 1.0)

        made.until(spare_idles, "a record of the idle spare", 15.0)
        record = store.get_racks(made.run.run)["rack-1"]
        assert record.column("cap_w")[2] == config.emulated.min_cap_w
        assert record.budget_w == 2 * config.emulated.normal_cap_w + config.emulated.min_cap_w
        assert time.time() - record.at < 10.0
        made.stop()
    made.check()
