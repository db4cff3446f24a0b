"""The vote over what survivors report, and the plan that follows from it."""

from __future__ import annotations

import pytest

from runtime.config import Config
from runtime.control.succession import Aim, Past, StateLost, Vote, succeed, vote
from runtime.errors import PlanError
from runtime.plan.generation import GenerationPlan, RollForward, Standing
from runtime.plan.manifest import Start
from tests.support.control_cluster import sim_config


def at(
    gpu: str, applied: int, *, layout: int = 1, synced: bool = False, norm: float | None = None
) -> Standing:
    return Standing(
        gpu=gpu,
        generation=1,
        applied_step=applied,
        layout_generation=layout,
        synced=synced,
        grad_norm=norm,
    )


ROLL = RollForward(step=4, grad_norm=2.5)


@pytest.mark.parametrize(
    ("standings", "outcome"),
    [
        ((), Vote(applied_step=0, roll_forward=None, holders=())),
        # Fresh processes have no say.
        ((at("a", 0, layout=0),), Vote(applied_step=0, roll_forward=None, holders=())),
        # Nobody applied the step at hand, synchronised or not: it is dropped.
        (
            (at("a", 4), at("b", 4, synced=True)),
            Vote(applied_step=4, roll_forward=None, holders=("a", "b")),
        ),
        # Somebody applied it: who holds its gradients follows, with that norm.
        (
            (at("a", 5, norm=2.5), at("b", 4, synced=True), at("c", 4, synced=True)),
            Vote(applied_step=5, roll_forward=ROLL, holders=("a", "b", "c")),
        ),
        # Who is behind without gradients comes empty.
        (
            (at("a", 5, norm=2.5), at("b", 4), at("c", 3, synced=True)),
            Vote(applied_step=5, roll_forward=None, holders=("a",)),
        ),
        # Everybody applied it.
        (
            (at("a", 5, norm=2.5), at("b", 5, norm=2.5)),
            Vote(applied_step=5, roll_forward=None, holders=("a", "b")),
        ),
        # A rank that fetched its state knows no norm: one that applied the step does.
        (
            (at("a", 5), at("b", 4, synced=True), at("c", 5, norm=2.5)),
            Vote(applied_step=5, roll_forward=ROLL, holders=("a", "b", "c")),
        ),
    ],
)
def test_vote(standings: tuple[Standing, ...], outcome: Vote) -> None:
    assert vote(standings) == outcome
    assert vote(standings[::-1]) == outcome


def test_a_commit_that_was_told_counts_though_all_who_applied_it_are_gone() -> None:
    standings = (at("a", 4, synced=True), at("b", 4, synced=True), at("c", 3))
    outcome = vote(standings, committed_steps=5, told_norm=2.5)
    assert outcome == Vote(applied_step=5, roll_forward=ROLL, holders=("a", "b"))
    # One step on: it is what everybody has.
    assert vote(standings, committed_steps=4, told_norm=2.5).roll_forward is None


def test_a_told_norm_helps_where_no_survivor_knows_it() -> None:
    outcome = vote((at("a", 5), at("b", 4, synced=True)), committed_steps=5, told_norm=2.5)
    assert outcome == Vote(applied_step=5, roll_forward=ROLL, holders=("a", "b"))


# the plan ----------------------------------------------------------------------------------------


def aims(config: Config, *live: tuple[int, ...]) -> list[Aim]:
    return [
        Aim(
            replica=i,
            mode="training" if slots else "out",
            live=slots,
            num_samples=12 // sum(1 for s in live if s) if slots else 0,
            caps_w=(1000.0,) * config.cluster.racks[i].gpus,
        )
        for i, slots in enumerate(live)
    ]


def follow(
    config: Config,
    wanted: list[Aim],
    standings: tuple[Standing, ...],
    *,
    history: dict[int, GenerationPlan] | None = None,
    committed: int = 0,
    start: Start | None = None,
) -> GenerationPlan:
    plan, _ = succeed(
        config,
        run="r",
        number=max(history or {0: None}) + 1,
        store=("h", 1),
        past=Past(
            history=history or {},
            previous=history[max(history)] if history else None,
            standings={s.gpu: s for s in standings},
            committed_steps=committed,
            start=start or Start(),
        ),
        aims=wanted,
        planned=False,
    )
    return plan


def everybody(applied: int, layout: int) -> tuple[Standing, ...]:
    return tuple(at(f"rack-{r}/{s}", applied, layout=layout) for r in range(2) for s in range(2))


def test_the_first_plan_starts_from_the_seed_or_the_checkpoint() -> None:
    config = sim_config(2, 2)
    wanted = aims(config, (0, 1), (0, 1))
    plan = follow(config, wanted, everybody(0, 0))
    assert (plan.generation, plan.applied_step, plan.sources, plan.checkpoint) == (1, 0, (), "")
    start = Start(checkpoint="/c", run="before", step=7)
    plan = follow(config, wanted, everybody(0, 0), start=start, committed=7)
    assert (plan.applied_step, plan.sources, plan.checkpoint) == (7, (), "/c")


def test_before_the_first_commit_everybody_starts_over() -> None:
    config = sim_config(2, 2)
    wanted = aims(config, (0, 1), (0, 1))
    first = follow(config, wanted, everybody(0, 0))
    plan = follow(config, wanted, everybody(0, 1), history={1: first})
    assert (plan.generation, plan.applied_step, plan.sources) == (2, 0, ())


def test_sources_are_named_by_the_layout_they_are_on() -> None:
    config = sim_config(2, 2)
    first = follow(config, aims(config, (0, 1), (0, 1)), everybody(0, 0))
    standings = tuple(s for s in everybody(3, 1) if s.gpu != "rack-0/1")
    plan = follow(config, aims(config, (0,), (0, 1)), standings, history={1: first}, committed=3)
    assert [s.gpus for s in plan.sources] == [("rack-0/0",), ("rack-1/0", "rack-1/1")]
    assert all(s.holders == first.replicas[s.replica].holders for s in plan.sources)
    assert set(plan.replicas[0].holders["mlp"]) == {0}


def test_a_layout_that_is_forgotten_is_no_state() -> None:
    config = sim_config(2, 2)
    first = follow(config, aims(config, (0, 1), (0, 1)), everybody(0, 0))
    standings = (at("rack-0/0", 3, layout=99), *everybody(3, 1)[1:])
    wanted = aims(config, (0, 1), (0, 1))
    plan = follow(config, wanted, standings, history={1: first}, committed=3)
    assert "rack-0/0" not in {gpu for s in plan.sources for gpu in s.gpus}


def test_state_lost_is_said() -> None:
    config = sim_config(2, 2)
    first = follow(config, aims(config, (0, 1), (0, 1)), everybody(0, 0))
    history = {1: first}
    with pytest.raises(StateLost, match="5 steps were committed, but the newest live state is"):
        follow(config, aims(config, (0, 1), (0, 1)), everybody(3, 1), history=history, committed=5)
    with pytest.raises(StateLost, match="no live GPU holds any state"):
        follow(config, aims(config, (0, 1), (0, 1)), everybody(0, 0), history=history, committed=5)
    with pytest.raises(StateLost, match="no member holds"):
        follow(
            config,
            aims(config, (0,), ()),
            (at("rack-0/0", 3),),
            history=history,
            committed=3,
        )
    with pytest.raises(PlanError, match="no replica trains"):
        follow(config, aims(config, (), ()), everybody(3, 1), history=history, committed=3)
