"""Units that several slots hold and split by sample, where whole units do not divide evenly.

64 query heads over 7 slots: nine each, and the 64th takes turns, sample by sample. Every holder
has the whole unit; its gradient is summed over all holders like a key/value head's. Starts from the
takeover layout, which stays the first turn, so that sharing out again moves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from runtime.config import ModelConfig, TrainConfig
from runtime.layout.takeover import takeover
from runtime.layout.units import STORED_FAMILIES, num_units, rota
from runtime.layout.work import slot_flops
from runtime.plan.generation import Holders, turn_key

# Vocabulary blocks are many and small, and their logits meet in one softmax: never shared.
SHAREABLE = ("attention", "mlp")

# More turns than this make more copies, not more evenness.
_MAX_TURNS = 16
# "auto": the busiest slot must get this much less work; and turns that differ by less are alike.
_LEAST_GAIN = 0.01
_ALIKE = 0.002


def layout_for(
    model: ModelConfig,
    train: TrainConfig,
    num_replicas: int,
    home: Holders,
    holders: Holders,
    live: Sequence[int],
) -> Holders:
    """The layout that a training replica takes over `live`: `takeover`, shared where set so.

    A whole replica keeps its home layout. Turns are chosen for the samples that a slot sees at a
    time: a micro-batch, or what the replica gets of the global batch.

    Raises:
        PlanError: no live slot.
    """
    whole = takeover(model, home, holders, live)
    alive = frozenset(live)
    samples = min(train.micro_batch, -(-train.global_batch // num_replicas), _MAX_TURNS)
    if train.fractional == "off" or samples < 2 or alive.issuperset(set().union(*home.values())):
        return whole
    turns = {
        family: count
        for family in SHAREABLE
        if (count := num_turns(num_units(model, family), len(alive), samples)) > 1
    }
    if train.fractional == "on":
        return share_out(model, home, holders, whole, sorted(alive), turns)
    best, least = whole, _busiest(model, train.seq_len, whole) * (1 - _LEAST_GAIN)
    for families in (["attention"], ["mlp"], ["attention", "mlp"]):
        if turns.keys() >= set(families):
            chosen = {family: turns[family] for family in families}
            shared = share_out(model, home, holders, whole, sorted(alive), chosen)
            busiest = _busiest(model, train.seq_len, shared)
            if busiest <= least:
                best, least = shared, busiest * (1 - _ALIKE)
    return best


def num_turns(units: int, slots: int, samples: int) -> int:
    """Turns in which `slots` split the remainder of `units`, so that the busiest has least to do.

    The fewest turns that do about as well as the best, as each means copies of a unit; 1 where the
    units divide evenly.

    Args:
        samples: worked on at a time; sample i falls into turn i mod turns.
    """
    base, remainder = divmod(units, slots)
    if not remainder:
        return 1

    def busiest(turns: int) -> float:
        per_slot = -(-remainder * turns // slots)
        return base + min(turns, per_slot) * -(-samples // turns) / samples

    costs = {turns: busiest(turns) for turns in range(1, min(samples, _MAX_TURNS) + 1)}
    limit = min(costs.values()) * (1 + _ALIKE)
    return next(turns for turns, cost in costs.items() if cost <= limit)


def share_out(
    model: ModelConfig,
    home: Holders,
    now: Holders,
    whole: Holders,
    live: Sequence[int],
    turns: Mapping[str, int],
) -> Holders:
    """`whole` with the remainder of every family in `turns` split in that many turns.

    now: the layout that it is reached from.

    Slots with a unit more than others give it up, a guest before a unit at home, one that is shared
    already before another. Every turn goes to
    the slots that have had fewest, of those to one that holds the unit already or did so till now.
    """
    shared = {family: whole[family] for family in STORED_FAMILIES}
    for family, count in turns.items():
        present = rota(now, family)
        if len(present) == count and present[0] == whole[family] and _is_even(present, live):
            shared |= {turn_key(family, turn): row for turn, row in enumerate(present)}
            continue
        owners = Counter(whole[family])
        base = min(owners[slot] for slot in live)
        there = list(zip(*present, strict=True))
        given = [
            max(
                (unit for unit, owner in enumerate(whole[family]) if owner == slot),
                key=lambda u, slot=slot: (home[family][u] != slot, len(set(there[u])), u),  # type: ignore[misc]
            )
            for slot in live
            if owners[slot] > base
        ]
        taken = Counter(whole[family][unit] for unit in given)
        holding = {unit: {whole[family][unit]} for unit in given}
        copies = Counter(taken)
        for turn in range(1, count):
            row, free = list(whole[family]), set(live)
            for unit in given:
                heir = min(
                    free,
                    key=lambda s, u=unit: (  # type: ignore[misc]
                        taken[s],
                        s not in holding[u],
                        s not in there[u],
                        copies[s],
                        s,
                    ),
                )
                free.discard(heir)
                row[unit] = heir
                taken[heir] += 1
                copies[heir] += heir not in holding[unit]
                holding[unit].add(heir)
            shared[turn_key(family, turn)] = tuple(row)
    return shared


def _is_even(turns: Sequence[Sequence[int]], live: Sequence[int]) -> bool:
    """Whether exactly `live` share the work, over each turn and over all."""
    for rows in [*([turn] for turn in turns), turns]:
        done = Counter(slot for row in rows for slot in row)
        if not done.keys() <= set(live) or max(done.values()) - min(done[s] for s in live) > 1:
            return False
    return True


def _busiest(model: ModelConfig, seq_len: int, holders: Holders) -> float:
    """FLOPs per sample of the busiest slot."""
    num_slots = 1 + max(max(slots) for slots in holders.values())
    return max(slot_flops(model, seq_len, holders, num_slots))


def max_over_even(model: ModelConfig, holders: Holders, family: str, samples: int) -> float:
    """Most unit-samples of a family on any slot over the even share, for `samples` at a time."""
    turns = rota(holders, family)
    done: Counter[int] = Counter()
    for sample in range(samples):
        done.update(turns[sample % len(turns)])
    return max(done.values()) * len(done) / (num_units(model, family) * samples)
