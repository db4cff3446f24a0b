"""What the runs that a search found add up to: last week's goodput, say. Pure but for the tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.components.parts import Tile, tiles
from app.palette import BUCKET_LOOKS
from app.words import DASH, number, percent, plural, seconds
from storage.history.queries import RunSummary
from storage.records import BUCKETS, Bucket


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Of several runs, each weighted by its wall time.

    token_goodput: committed tokens over what the healthy runs would have committed, of those that
    know it; None when none does. ledger: bucket -> seconds.
    """

    num_runs: int
    wall_s: float
    tokens: int
    token_goodput: float | None
    ledger: dict[str, float]

    @property
    def time_goodput(self) -> float | None:
        spent = sum(self.ledger.values())
        return self.ledger.get("productive", 0.0) / spent if spent > 0 else None

    @property
    def dearest(self) -> tuple[Bucket, float] | None:
        """The bucket beside productive time that took most, None when there is none."""
        spent = [(bucket, self.ledger.get(bucket, 0.0)) for bucket in BUCKETS[1:]]
        bucket, spent_s = max(spent, key=lambda one: one[1])
        return (bucket, spent_s) if spent_s > 0 else None


def sums_of(runs: Sequence[RunSummary]) -> Sums:
    known = [one for one in runs if one.token_goodput]
    ideal = sum(one.tokens / one.token_goodput for one in known if one.token_goodput)
    return Sums(
        num_runs=len(runs),
        wall_s=sum(one.wall_s for one in runs),
        tokens=sum(one.tokens for one in runs),
        token_goodput=sum(one.tokens for one in known) / ideal if ideal > 0 else None,
        ledger={bucket: sum(one.ledger.get(bucket, 0.0) for one in runs) for bucket in BUCKETS},
    )


def sum_tiles(runs: Sequence[RunSummary], *, is_cut: bool) -> None:
    """Of `runs`, which are all that were found unless `is_cut`."""
    sums = sums_of(runs)
    dearest, cost = DASH, "no time was lost"
    if sums.dearest is not None:
        bucket, spent_s = sums.dearest
        share = spent_s / max(sum(sums.ledger.values()), 1e-9)
        dearest, cost = BUCKET_LOOKS[bucket].word, f"{seconds(spent_s)}, {percent(share)} of it"
    which = "the newest that match" if is_cut else "all that match"
    items = [
        Tile(label="Runs", value=str(sums.num_runs), sub=which),
        _goodput("Token goodput", sums.token_goodput, "of the healthy runs' tokens"),
        _goodput("Time goodput", sums.time_goodput, "of their wall time"),
        Tile(label="Tokens", value=number(sums.tokens), sub="committed"),
        Tile(label="Wall time", value=seconds(sums.wall_s), sub=plural(sums.num_runs, "run")),
        Tile(label="Lost most to", value=dearest, sub=cost),
    ]
    tiles(items, "history_sums")


def _goodput(label: str, share: float | None, sub: str) -> Tile:
    value = percent(share).removesuffix(" %")
    return Tile(label=label, value=value, unit="%" if share is not None else "", sub=sub)
