"""Random mixes of shapes for the sync and move proofs, and plans over them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from runtime.config import ModelConfig
from runtime.layout.fractional import SHAREABLE, share_out
from runtime.layout.takeover import home_holders, takeover
from runtime.layout.units import num_units, without
from runtime.plan.generation import GenerationPlan, Holders, ReplicaPlan, Source

# (live slots before, live slots after, mode) of one replica.
Shape = tuple[frozenset[int], frozenset[int], str]


def plan_of(
    replicas: Sequence[ReplicaPlan], sources: Sequence[Source] = (), generation: int = 1
) -> GenerationPlan:
    return GenerationPlan(
        run="proof",
        generation=generation,
        store_host="127.0.0.1",
        store_port=1,
        replicas=tuple(replicas),
        sources=tuple(sources),
    )


def replica_plan(
    number: int, slots: int, live: Sequence[int], holders: Holders, mode: str = "training"
) -> ReplicaPlan:
    return ReplicaPlan(
        replica=number,
        rack=f"r{number}",
        mode=mode if live else "out",
        gpus=tuple(f"r{number}/{slot}" for slot in range(slots)),
        live=tuple(sorted(live)),
        holders=holders,
        num_samples=1 if mode == "training" else 0,
    )


def shared_layout(
    model: ModelConfig, home: Holders, now: Holders, live: Sequence[int], turns: int
) -> Holders:
    """The takeover layout with what does not divide evenly split in `turns`; 1: not split."""
    whole = takeover(model, home, now, live)
    uneven = [family for family in SHAREABLE if turns > 1 and num_units(model, family) % len(live)]
    return share_out(model, home, home, whole, sorted(live), dict.fromkeys(uneven, turns))


def mixed_plan(
    model: ModelConfig,
    slots: Sequence[int],
    live: Sequence[Sequence[int]],
    standby: int = -1,
    turns: int = 1,
) -> GenerationPlan:
    """Every replica on its takeover layout, uneven remainders split in `turns`; replica number
    `standby` keeps holes instead."""
    replicas = []
    for number, (count, alive) in enumerate(zip(slots, live, strict=True)):
        home = home_holders(model, count)
        if number == standby:
            dead = [slot for slot in range(count) if slot not in alive]
            before = shared_layout(model, home, home, range(count), turns)
            holders, mode = without(before, dead), "standby"
        else:
            holders, mode = shared_layout(model, home, home, alive, turns), "training"
        replicas.append(replica_plan(number, count, alive, holders, mode))
    return plan_of(replicas)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.sampled_from([1, 2, 3, 8]))
    return ModelConfig(
        num_layers=draw(st.integers(1, 2)),
        hidden=2,
        num_query_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        head_dim=2,
        mlp_hidden=2 * draw(st.sampled_from([7, 13, 31, 43])),
        mlp_block=2,
        vocab=draw(st.sampled_from([17, 64, 97])),
        vocab_block=draw(st.sampled_from([1, 4])),
        tied=draw(st.booleans()),
    )


@st.composite
def mixes(draw: st.DrawFn) -> tuple[ModelConfig, GenerationPlan]:
    """A model and 1 to 4 replicas of 1 to 8 slots, any of them dead, perhaps one on standby, with
    or without shared units."""
    model = draw(models())
    slots = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    live = [sorted(draw(st.frozensets(st.integers(0, count - 1), min_size=1))) for count in slots]
    standby = draw(st.integers(-1, len(slots) - 1)) if len(slots) > 1 else -1
    return model, mixed_plan(model, slots, live, standby, draw(st.sampled_from([1, 1, 2, 3, 5])))
