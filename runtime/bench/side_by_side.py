"""The table of what people would use instead, row by row, from the benches' own figures.

`./run bench` prints it, and README shows the one of the figures kept in
docs/measurements/side-by-side.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.bench.benchmark import Figures
from runtime.errors import UserError

# Benches that the rows come from.
NAMES = ("peers", "sync", "goodput")
_STEP_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. reached: None where it could not be measured."""

    compared: str
    measured: str
    to_reach: str
    reached: bool | None


def rows(measured: Mapping[str, Figures]) -> list[Row]:
    """The rows that `measured` (figures by bench) has anything to say about.

    Raises:
        UserError: a figure is missing.
    """
    peers, sync, goodput = (measured.get(name) for name in NAMES)
    found: list[Row] = []
    try:
        if peers is not None:
            found += _steady(peers)
        if sync is not None:
            found += _sync(sync)
        if peers is not None:
            found += _recovery(peers, "")
            found += _recovery(peers, "tp4_") if "tp4_recovery_s" in peers else []
            found += _still(peers)
        if goodput is not None:
            found += _goodput(goodput)
    except KeyError as error:
        raise UserError(f"the figures lack {error}: measure them with this version") from error
    return found


def markdown(found: Iterable[Row]) -> str:
    """The rows as a Markdown table."""
    verdicts = {True: "reached", False: "**missed**", None: "not measured"}
    lines = ["| compared | measured | to reach | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row.compared} | {row.measured} | {row.to_reach} | {verdicts[row.reached]} |"
        for row in found
    ]
    return "\n".join(lines)


def _steady(peers: Figures) -> list[Row]:
    return [
        _ratios(
            "step time, uniform shape: ours / DTensor tensor parallelism + DDP, 4 and 2 ranks",
            [(peers["step_ratio_dtensor"], 0.68), (peers["step_ratio_dtensor_2_ranks"], 0.80)],
        ),
        _ratios(
            "the same: ours / a bare column/row-parallel loop without fault tolerance",
            [(peers["step_ratio_bare"], 1.03), (peers["step_ratio_bare_2_ranks"], 1.03)],
        ),
    ]


def _ratios(compared: str, pairs: list[tuple[float, float]]) -> Row:
    return Row(
        compared,
        "; ".join(f"{value:.2f}" for value, _ in pairs),
        "<= " + "; ".join(f"{limit:.2f}" for limit in dict.fromkeys(limit for _, limit in pairs)),
        all(value <= limit for value, limit in pairs),
    )


def _sync(sync: Figures) -> list[Row]:
    direct, reshard = sync["intra_rack_bytes_direct"], sync["intra_rack_bytes_reshard"]
    ratio, mixed = sync["exposed_direct_over_reshard"], sync["mixed_over_uniform"]
    return [
        Row(
            "mixed shapes, `direct` / `reshard`: bytes a step inside a healthy replica; exposed "
            "sync time",
            f"{direct} / {reshard / 1e6:.1f} MB; {ratio:.2f}",
            "0; < 1",
            direct == 0 and ratio < 1.0,
        ),
        _ratios("step time per unit of work: mixed / uniform shape", [(mixed, 1.01)]),
    ]


def _recovery(peers: Figures, prefix: str) -> list[Row]:
    """Ours beside torchft as it comes, torchft tuned, and a torchrun restart."""
    degree = 4 if prefix else 2

    def each(form: Callable[[str], str]) -> str:
        return " / ".join(form(s) for s in ("", "_torchft", "_torchft_tuned", "_restart"))

    def of(key: str) -> Callable[[str], str]:
        return lambda suffix: _text(peers.get(f"{prefix}{key}{suffix}"))

    ours = peers[f"{prefix}recovery_s"]
    limits = {"_torchft": 10.0, "_torchft_tuned": 2.5, "_restart": 10.0}
    theirs = {s: peers.get(f"{prefix}recovery_s{s}") for s in limits}
    quick = [t / ours >= limits[s] for s, t in theirs.items() if isinstance(t, float)]
    whole = 2 * degree
    kept = peers[f"{prefix}steps_redone"] == 0 and peers[f"{prefix}ranks_in_play"] == whole - 1
    times = ", ".join(
        f"{t / ours:.0f}x" if isinstance(t, float) else "not measured" for t in theirs.values()
    )
    throughput = [
        _text(peers.get(f"{prefix}degraded_throughput{suffix}")) for suffix in ("", "_torchft")
    ]
    return [
        Row(
            f"SIGKILL to the next committed step, 2 x TP{degree}: ours / torchft / torchft tuned "
            "to 1 s / torchrun restart",
            f"{each(of('recovery_s'))} s ({times})",
            ">= 10x, 2.5x, 10x",
            all(quick) if len(quick) == len(limits) else None if all(quick) else False,
        ),
        Row(
            "of it: steps redone; ranks in play; throughput while degraded, ours / torchft",
            f"{each(of('steps_redone'))}; {each(of('ranks_in_play'))} of {whole}; "
            f"{' / '.join(throughput)} of healthy",
            f"0 redone; {whole - 1} of {whole}; global batch unchanged",
            kept,
        ),
    ]


def _still(peers: Figures) -> list[Row]:
    hung, stopped = peers["fence_hang_s"], peers["fence_stop_s"]
    torchft = peers.get("torchft_stopped_s")
    theirs = f"; torchft {torchft:.0f} s" if isinstance(torchft, float) else ""
    limit = 3 * _STEP_DEADLINE_S
    return [
        Row(
            "alive but hung, and SIGSTOP: fenced and committing again",
            f"{hung:.2f} s; {stopped:.2f} s{theirs}",
            f"<= {limit:g} s, 3 step deadlines of {_STEP_DEADLINE_S:g} s",
            hung <= limit and stopped <= limit,
        )
    ]


def _goodput(goodput: Figures) -> list[Row]:
    below = goodput["below_allowed"]
    others = " / ".join(
        f"{goodput[name]:.2f}" for name in ("drop", "torchft", "torchft_tuned", "restart")
    )
    return [
        Row(
            "goodput of 10 minutes, a kill every 30 s (simulated, costs measured): boost / no "
            "boost / drop replica / torchft / torchft tuned / restart",
            f"{goodput['boost']:.3f} / {goodput['no_boost']:.3f} / {others}; the shape allows "
            f"{goodput['allowed_by_shape']:.3f}: {below:.1%} below "
            f"({goodput['below_if_steps_at_hand_were_kept']:.1%} if no step at hand were lost)",
            "ahead of all; <= 1 % below",
            goodput["best_other_over_ours"] < 1.0 and below <= 0.01,
        )
    ]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
