"""What a checkpoint of a run says of itself once all its parts are on disk. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from runtime.control.instructions import Seal
from runtime.plan.manifest import Manifest, Part

if TYPE_CHECKING:
    from runtime.control.coordinator import Coordinator


def seal_of(
    coordinator: Coordinator,
    folder: str,
    step: int,
    parts: Mapping[str, Part],
    now: float,
    *,
    cost: str = "",
) -> Seal:
    """The order to seal the checkpoint in `folder` after `step` steps.

    parts: by GPU id. cost: what it took, for the journal.
    """
    config = coordinator.config
    ledger = coordinator.progress.ledger.totals(now)
    manifest = Manifest(
        run=coordinator.run,
        applied_step=step,
        model=config.model,
        train=config.train,
        parts=tuple(part for _, part in sorted(parts.items())),
        origin=config.checkpoint.start,
        next_sample=step * config.train.global_batch,
        ledger={bucket: round(seconds, 3) for bucket, seconds in ledger.items() if seconds > 0},
    )
    size_mb = sum(part.num_bytes for part in manifest.parts) / 1e6
    told = f"checkpoint at step {step}: {size_mb:.1f} MB in {len(manifest.parts)} parts"
    return Seal(folder=folder, manifest=manifest, told=told + (f"; {cost}" if cost else ""))
