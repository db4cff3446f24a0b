"""Defects to inject into the engine and its layouts, each as a patch that lasts for a `with`.

Every defect is one that a hand could make: a unit left out, a wrong owner, a stale copy. Ranks are
threads named after their GPU, so a defect may sit on one of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from runtime.engine import (
    blocks,
    engine,
    entry,
    layers,
    move,
    parts,
    passage,
    state,
    step,
    sync,
    wiring,
)
from runtime.engine import reshard as engine_reshard
from runtime.layout import reshard, units
from runtime.layout import sync as layout_sync
from runtime.plan.generation import GenerationPlan
from tests.support import engine_pool

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Defect:
    """name: what is wrong, in words. target.attribute is replaced by `change` of itself."""

    name: str
    target: Any
    attribute: str
    change: Change

    @contextmanager
    def injected(self) -> Iterator[None]:
        original = self.target.__dict__[self.attribute]
        plain = original.__func__ if isinstance(original, staticmethod) else original
        changed = self.change(plain)
        if isinstance(original, staticmethod):
            changed = staticmethod(changed)
        with patch.object(self.target, self.attribute, changed):
            yield


def on(gpu: str) -> bool:
    return threading.current_thread().name == gpu


def result(change: Callable[..., Any]) -> Change:
    """A function whose result is changed: `change(result, *arguments)`."""
    return lambda f: lambda *a, **k: change(f(*a, **k), *a)


def nothing(_: Any) -> Any:
    return lambda *a, **k: None


# ── gradient sync ─────────────────────────────────────────────────────────────────────────────


def skip_a_unit(groups: Any, *_: Any) -> Any:
    first = next(group for group in groups if len(group.units["mlp"]) > 1)
    fewer = replace(first, units=first.units | {"mlp": first.units["mlp"][1:]})
    return tuple(fewer if group is first else group for group in groups)


def swap_owners(groups: Any, *_: Any) -> Any:
    first, *_others, last = (g for g in groups if len(g.units["mlp"]) > 1)
    return tuple(
        replace(g, units=last.units if g is first else first.units if g is last else g.units)
        for g in groups
    )


def forget_a_holder(groups: Any, *_: Any) -> Any:
    return tuple(replace(g, ranks=g.ranks[1:]) if 2 < len(g.ranks) < 7 else g for g in groups)


def one_kv_holder(tables: Any, model: Any, *_: Any) -> Any:
    return tables | {"kv": tables["kv"][: model.num_query_heads // model.num_kv_heads][:1]}


def reverse_order_on_one_rank(f: Any) -> Any:
    """Of buckets or of stages."""

    def init(self: Any, buckets: Any, *a: Any) -> None:
        f(self, buckets[::-1] if on("r0/0") else buckets, *a)

    return init


def launch_before_backward(f: Any) -> Any:
    def begin(self: Any) -> None:
        f(self)
        self._missing.clear()
        self._launch()

    return begin


def lose_a_hand_over(plan: Any, *_: Any) -> Any:
    return replace(plan, handovers=plan.handovers[1:])


def wrong_core(found: Any, *_: Any) -> Any:
    groups = list(found.groups)
    groups[0], groups[1] = (
        replace(groups[0], units=groups[1].units),
        replace(groups[1], units=groups[0].units),
    )
    return replace(found, groups=tuple(groups))


# ── step ──────────────────────────────────────────────────────────────────────────────────────


def apply_twice_on_one_rank(f: Any) -> Any:
    def apply(train: Any, state: Any, grad_norm: float) -> None:
        grads = state.grads.clone()
        f(train, state, grad_norm)
        if on("r1/0"):
            state.grads.copy_(grads)
            f(train, state, grad_norm)

    return apply


def clip_by_own_norm(f: Any) -> Any:
    return lambda train, state, _: f(train, state, float(torch.linalg.vector_norm(state.grads)))


def own_units(_: Any) -> Any:
    """Every rank counts all it holds."""

    def canonical(model: Any, plan: Any, rank: int) -> Any:
        gpu = plan.members()[rank]
        replica = next(r for r in plan.replicas if gpu in r.gpus)
        return units.held_units(model, replica.holders, replica.gpus.index(gpu))

    return canonical


def stale_layout_on_one_rank(f: Any) -> Any:
    def seat(model: Any, plan: GenerationPlan, gpu: str) -> Any:
        found = f(model, plan, gpu)
        brought = plan.layout_of(gpu)
        if on("r0/0") and brought is not None:
            return replace(found, held=units.held_units(model, *brought))
        return found

    return seat


def forget_turns_of_a_slot(f: Any) -> Any:
    def samples(self: Any, number: int, first: int, count: int) -> Any:
        return f(self, number, first + (self.num_turns > 1 and on("r1/0")), count)

    return samples


def leave_out_when_idle(f: Any) -> Any:
    """A slot without a turn in a micro-batch hands on zeros that backward ends at."""

    def apply(self: Any, x: Any, first: int, compute: Any) -> Any:
        out = f(self, x, first, compute)
        counts = [len(self.samples(n, first, len(x))) for n, _ in enumerate(self.parts)]
        return out if any(counts) else out.detach()

    return apply


def swap_parts(f: Any) -> Any:
    return lambda self, rows, *a: f(self, [*rows[1:], *rows[:1]], *a)


def all_samples(_: Any) -> Any:
    return lambda self, number, first, count: torch.arange(count)


def seed_by_rank(f: Any) -> Any:
    return lambda model, p, unit, seed: f(model, p, unit, seed + on("r1/3"))


# ── model ─────────────────────────────────────────────────────────────────────────────────────


def local_backward(f: Any) -> Any:
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.group = type("Alone", (), {"all_reduce": lambda self, tensor: None})()
        return f(ctx, grad)

    return backward


def unmasked_padding(f: Any) -> Any:
    return lambda ctx, logits, rows, num_padded, group: f(ctx, logits, rows, 0, group)


def first_kv_head(f: Any) -> Any:
    def init(self: Any, *a: Any) -> None:
        f(self, *a)
        if self._kv_index is not None:
            self._kv_index = torch.zeros_like(self._kv_index)

    return init


# ── state, moves, checkpoints ─────────────────────────────────────────────────────────────────


def decay_norms(f: Any) -> Any:
    def init(self: Any, *a: Any) -> None:
        f(self, *a)
        self.decayed = lambda no_decay: (slice(0, self.elements),)

    return init


def unpack_backwards(f: Any) -> Any:
    def unpack(state: Any, flow: Any, message: torch.Tensor) -> None:
        f(state, flow, message.flip(0))

    return unpack


def moments_stay(f: Any) -> Any:
    def unpack(state: Any, flow: Any, message: torch.Tensor) -> None:
        message = message.clone()
        message[message.numel() // 3 :] = 0.0
        f(state, flow, message)

    return unpack


def stale_message(f: Any) -> Any:
    def pack(state: Any, flow: Any) -> torch.Tensor:
        return f(state, flow) * (1.0 - 1e-12)

    return pack


def settle(for_all: bool) -> Change:
    """Roll forward with a norm of 1, or also on ranks that have applied the step already."""

    def change(f: Any) -> Any:
        def settled(self: Any, plan: GenerationPlan) -> Any:
            roll, mine = plan.roll_forward, self._state
            if roll is None or mine is None:
                return f(self, plan)
            if not for_all:
                wrong = msgspec.structs.replace(roll, grad_norm=1.0)
                return f(self, msgspec.structs.replace(plan, roll_forward=wrong))
            if mine.applied_step > roll.step:
                mine.applied_step -= 1
                mine.synced = True
            return f(self, plan)

        return settled

    return change


def stay_away_from_home(f: Any) -> Any:
    """Takeover without going home: units stay wherever they are."""

    def layout(model: Any, train: Any, count: int, home: Any, now: Any, live: Any) -> Any:
        return f(model, train, count, units.first_turn(now), now, live)

    return layout


def reversed_rows(f: Any) -> Any:
    def copy(state: Any, some: Any) -> Any:
        copied = f(state, some)
        flipped = {n: t.flip(1).contiguous() for n, t in copied.tensors.items()}
        return replace(copied, tensors=flipped)

    return copy


def no_moments(f: Any) -> Any:
    def copy(state: Any, some: Any) -> Any:
        copied = f(state, some)
        for tensor in copied.tensors.values():
            tensor[1:] = 0.0
        return copied

    return copy


DEFECTS = (
    Defect("sync skips a unit", wiring, "sync_groups", result(skip_a_unit)),
    Defect("sync sums units of the wrong owner", wiring, "sync_groups", result(swap_owners)),
    Defect("sync forgets a holder", wiring, "sync_groups", result(forget_a_holder)),
    Defect("a bucket is summed twice", wiring, "buckets", result(lambda b, *_: (*b, *b[-1:]))),
    Defect("one holder of a key/value head counts", layout_sync, "rank_tables",
           result(one_kv_holder)),
    Defect("bucket order reversed on one rank", sync.DirectSync, "__init__",
           reverse_order_on_one_rank),
    Defect("buckets leave before backward", sync.DirectSync, "begin", launch_before_backward),
    Defect("sums are not put back", sync._Parcel, "unpack", nothing),
    Defect("reshard loses a hand-over", wiring, "reshard_plan", result(lose_a_hand_over)),
    Defect("reshard sums units at the wrong core", wiring, "reshard_plan", result(wrong_core)),
    Defect("reshard drops what is handed over", passage._Box, "add", nothing),
    Defect("reshard does not hand back", passage.Passage, "finish", nothing),
    Defect("reshard counts handed rows at every holder", reshard, "_handovers",
           result(lambda flows, *_: [*flows, *flows[:1]])),
    Defect("stages in another order on one rank", engine_reshard.ReshardSync, "__init__",
           reverse_order_on_one_rank),
    Defect("a step is applied twice on one rank", step, "apply_step", apply_twice_on_one_rank),
    Defect("clipping by the rank's own norm", step, "apply_step", clip_by_own_norm),
    Defect("norm counts every copy", entry, "canonical_units", own_units),
    Defect("gradients by the replica's tokens", step.Stepper, "_tokens",
           lambda _: property(lambda s: s.replica.num_samples * s.train.seq_len)),
    Defect("replicas take the same samples", GenerationPlan, "first_sample",
           lambda _: lambda plan, replica, step: step * plan.global_batch),
    Defect("a replica is a sample too far", GenerationPlan, "first_sample",
           result(lambda first, plan, replica, step: first + replica)),
    Defect("stale layout on one rank", engine, "find_seat", stale_layout_on_one_rank),
    Defect("initial weights differ on one rank", state, "initial_row", seed_by_rank),
    Defect("a sharer takes its turn too late", parts.Parts, "samples", forget_turns_of_a_slot),
    Defect("sharers all take every sample", parts.Parts, "samples", all_samples),
    Defect("only one of a unit's sharers is summed", layout_sync, "_rank_rows",
           result(lambda rows, *_: rows[:1])),
    Defect("a part works with another part's rows", parts.Cut, "__init__", swap_parts),
    Defect("a slot without a turn leaves backward out", parts.Parts, "apply", leave_out_when_idle),
    Defect("backward forgets the other slots", layers.NormIntoReplica, "backward", local_backward),
    Defect("padded vocabulary rows count", layers.VocabParallelLoss, "forward", unmasked_padding),
    Defect("all query heads read one key/value head", blocks.Heads, "__init__", first_kv_head),
    Defect("norms decay", state.StateLayout, "__init__", decay_norms),
    Defect("moved rows in the wrong order", move, "_unpack", unpack_backwards),
    Defect("moments do not move", move, "_unpack", moments_stay),
    Defect("a moved row is not the same to the last bit", move, "_pack", stale_message),
    Defect("kept rows are not kept", move, "_copy_kept", nothing),
    Defect("roll forward with another norm", engine.Engine, "_settle", settle(for_all=False)),
    Defect("roll forward on all ranks", engine.Engine, "_settle", settle(for_all=True)),
    Defect("units do not go home", engine_pool, "layout_for", stay_away_from_home),
    Defect("checkpoint rows in the wrong order", engine, "copy_part", reversed_rows),
    Defect("checkpoint without moments", engine, "copy_part", no_moments),
)  # fmt: skip
