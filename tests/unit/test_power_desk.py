"""The power desk over simulated workers: what feedback compares with, and what it tells."""

from __future__ import annotations

import msgspec
import pytest

from runtime.config import ModelConfig
from runtime.control import messages as m
from runtime.control.farewell import RETURN_S
from runtime.control.power_desk import GOVERNOR
from runtime.power.rack_caps import CapBatch
from storage.commands import Stop
from storage.records import EventHappened, RunEnded
from tests.support.control_cluster import SimCluster, sim_config
from tests.support.control_restart import restart_controller

NORMAL_W = 1000.0
MAX_W = 1300.0


# 56 units of each family: even on 8 slots and on 7, so that shares are the caps' doing alone.
MODEL = ModelConfig(
    num_layers=1, hidden=16, num_query_heads=56, num_kv_heads=56, head_dim=2, mlp_hidden=448,
    mlp_block=8, vocab=448, vocab_block=8,
)  # fmt: skip
CONFIG = msgspec.structs.replace(sim_config(8, 8), model=MODEL)


class Powered:
    """A cluster whose agent sets every cap that is wished, and says so."""

    def __init__(self) -> None:
        self.cluster = SimCluster(CONFIG)
        self.number = 0
        self.told: tuple[float, ...] = ()
        self.steps(5)

    @property
    def caps_w(self) -> tuple[float, ...]:
        """What was wished last for rack 0."""
        caps: dict[str, float] = {}
        for order in self.cluster.ordered(m.SetDevice):
            caps |= order.caps_w
        return tuple(caps.get(f"rack-0/{slot}", NORMAL_W) for slot in range(8))

    @property
    def trims(self) -> list[m.SetDevice]:
        return [order for order in self.cluster.ordered(m.SetDevice) if order.by == GOVERNOR]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.cluster.run_steps(1)
            if self.caps_w != self.told:
                self.told = self.caps_w
                self.tell(batch(self.told, by=self.cluster.ordered(m.SetDevice)[-1].by))

    def tell(self, what: CapBatch) -> m.CapsSet:
        self.number += 1
        told = m.CapsSet(host="localhost", epoch=1, number=self.number, batch=what)
        self.again(told)
        return told

    def again(self, told: m.CapsSet) -> None:
        self.cluster._carry_out(self.cluster.coordinator.handle(told, self.cluster.now))

    def shrink_and_boost(self) -> None:
        """Rack 0 trains with 7 of its 8 GPUs, boosted; rack 1 is whole."""
        self.cluster.kill("rack-0/7")
        proposal = self.cluster.wait_for_proposal(0)
        assert self.cluster.approve(proposal, "shrink_boost").ok
        self.cluster.run_until(lambda: self.cluster.shape()[0] == tuple(range(7)))
        self.steps(60)
        assert NORMAL_W < min(self.caps_w[:7]) <= max(self.caps_w) < MAX_W

    def lose_the_other_rack(self) -> None:
        self.cluster.kill(*(f"rack-1/{slot}" for slot in range(8)))
        self.cluster.run_until(lambda: self.cluster.shape() == [tuple(range(7)), ()])

    @property
    def boost_w(self) -> list[float]:
        return [one.boost_w for one in self.cluster.coordinator.snapshot(self.cluster.now).replicas]


def batch(caps_w: tuple[float, ...], rack: str = "rack-0", by: str = GOVERNOR) -> CapBatch:
    return CapBatch(
        rack=rack, at=0.0, cause="wished", by=by, slots=tuple(range(8)), from_w=(NORMAL_W,) * 8,
        to_w=caps_w, refused={}, caps_w=caps_w, sum_w=sum(caps_w), budget_w=10_000.0,
    )  # fmt: skip


def test_a_lone_replica_that_carries_the_whole_batch_is_not_driven_to_the_limit() -> None:
    power = Powered()
    power.shrink_and_boost()
    settled, share_s = power.caps_w, power.cluster.steps[-1].replica_step_s[0]
    assert share_s == pytest.approx(0.5, rel=0.03)
    power.lose_the_other_rack()
    power.steps(80)
    last = power.cluster.steps[-1]
    assert [(replica, count) for replica, _, count in last.samples] == [(0, 12)]
    # It takes twice as long because it does twice as much: that is no lag.
    assert last.replica_step_s[0] == pytest.approx(2.0 * share_s, rel=0.03)
    assert power.caps_w == pytest.approx(settled, abs=25.0)
    assert max(power.caps_w) < MAX_W - 50.0


def test_more_samples_are_no_excuse_for_a_slot_that_lags() -> None:
    power = Powered()
    power.shrink_and_boost()
    power.lose_the_other_rack()
    power.steps(20)
    before = power.caps_w
    power.cluster.ranks.slowness["rack-0/2"] = 1.03
    power.steps(40)
    assert power.caps_w[2] > before[2] + 10.0
    assert power.trims[-1].cause.startswith("feedback")


def test_boost_is_never_below_nothing() -> None:
    power = Powered()
    power.tell(batch((700.0,) * 8, "rack-1", "ops"))
    assert power.boost_w == [0.0, 0.0]


def test_a_new_controller_goes_on_trimming_and_writes_no_cap_down_twice() -> None:
    power = Powered()
    power.shrink_and_boost()
    told = power.tell(batch(power.caps_w))
    num = len(power.cluster.events("cap_changed"))
    boost_w = power.boost_w
    restart_controller(power.cluster)
    power.again(told)
    assert len(power.cluster.events("cap_changed")) == num
    assert power.boost_w == boost_w
    seen = len(power.trims)
    power.cluster.ranks.slowness["rack-0/2"] = 1.03
    power.steps(40)
    assert len(power.trims) > seen


def test_the_last_caps_are_in_the_journal_before_its_end() -> None:
    power = Powered()
    power.shrink_and_boost()
    cluster = power.cluster
    cluster.submit(Stop(id="s", at=cluster.now, who="ada", via="cli"))
    cluster.run_until(lambda: bool(cluster.ordered(m.ReturnCaps)))
    cluster.run(1.0)
    assert cluster.finish is None
    power.tell(batch((NORMAL_W,) * 8, by="agent"))
    returned = m.CapsReturned(host="localhost")
    cluster._carry_out(cluster.coordinator.handle(returned, cluster.now))
    assert cluster.finish is not None
    *_, caps, end = [e for e in cluster.entries if isinstance(e, EventHappened | RunEnded)]
    assert isinstance(caps, EventHappened)
    assert isinstance(end, RunEnded)
    assert (caps.kind, caps.details["to_w"]) == ("cap_changed", [NORMAL_W] * 8)
    assert cluster.ordered(m.Quit)


def test_an_agent_that_says_nothing_at_the_end_keeps_nobody_waiting() -> None:
    power = Powered()
    power.tell(batch((900.0,) * 8))
    cluster = power.cluster
    cluster.submit(Stop(id="s", at=cluster.now, who="ada", via="cli"))
    cluster.run_until(lambda: bool(cluster.ordered(m.ReturnCaps)))
    began = cluster.now
    cluster.run_until(lambda: cluster.finish is not None)
    assert cluster.now - began == pytest.approx(RETURN_S, abs=0.2)
    (event,) = cluster.events("caps_not_returned")
    assert "localhost has not said" in event.message


def test_where_no_cap_was_set_nothing_is_waited_for() -> None:
    cluster = SimCluster(CONFIG)
    cluster.run_steps(3)
    cluster.submit(Stop(id="s", at=cluster.now, who="ada", via="cli"))
    cluster.run_until(lambda: cluster.finish is not None)
    assert cluster.ordered(m.ReturnCaps) == []
