"""Steps of a run as files: CSV for people and spreadsheets, Parquet for everything else.

pandas and the Parquet writer come with Streamlit. Nothing here knows the screen.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = (
    "step", "at", "generation", "loss", "grad_norm", "tokens", "step_s", "exposed_sync_s",
    "samples", "replica_step_s",
)  # fmt: skip


def as_csv(columns: Mapping[str, Sequence[Any]]) -> bytes:
    """One line a step; what was not a number is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(zip(*(columns[name] for name in COLUMNS), strict=True))
    return out.getvalue().encode()


def as_parquet(columns: Mapping[str, Sequence[Any]]) -> bytes:
    """The same with types, compressed."""
    import pandas as pd  # type: ignore[import-untyped]

    frame = pd.DataFrame({name: columns[name] for name in COLUMNS})
    out = io.BytesIO()
    frame.to_parquet(out, index=False)
    return out.getvalue()
