"""The fleet map: racks as one packed blob per tick, drawn on a canvas; a click comes back as a GPU
id.

Blob: uint32 length of the head, the head as JSON, then for all GPUs in the order of the racks one
byte of look (position in `CELL_LOOKS`, plus 128 where it is dimmed because a filter leaves it out)
and one uint16 of the lens (0 to 65534 from low to high, 65535 for no value).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from app.components.registry import mount
from app.palette import BOOSTED, CELL_LOOKS, DEGRADED, FAILED, SUSPECT
from app.words import watts
from storage.records import RackRecord

NO_VALUE = 65535
DIMMED = 128
TRAY = 4


@dataclass(frozen=True, kw_only=True)
class Lens:
    """What the cells show. column: of `RackRecord`, None for the state. scale: the column times it
    is in `unit`. relative: over the median of the rack's GPUs that have a value.
    """

    id: str
    label: str
    unit: str = ""
    column: str | None = None
    digits: int = 0
    scale: float = 1.0
    low: float = 0.0
    high: float | None = None
    colour: str = BOOSTED
    relative: bool = False
    rounded_to: float = 100.0


LENSES: tuple[Lens, ...] = (
    Lens(id="state", label="State"),
    Lens(id="power", label="Power", unit="W", column="power_w"),
    Lens(
        id="temperature",
        label="Temperature",
        unit="°C",
        column="temp_c",
        low=20,
        high=95,
        colour=FAILED,
    ),
    Lens(id="utilisation", label="Utilisation", unit="%", column="util", scale=100, high=100),
    Lens(id="clocks", label="Clocks", unit="MHz", column="clock_mhz", colour=SUSPECT),
    Lens(
        id="slowness",
        label="Fail-slow",
        unit="× the rack's median step",
        column="step_s",
        digits=2,
        low=0.9,
        high=1.5,
        colour=DEGRADED,
        relative=True,
    ),
    Lens(
        id="ecc",
        label="ECC",
        unit="uncorrected errors",
        column="ecc",
        colour=FAILED,
        rounded_to=1.0,
    ),
)


def pack(
    racks: Mapping[str, RackRecord],
    looks: Mapping[str, npt.NDArray[np.uint8]],
    lens: Lens,
    selected: str | None,
    shown: Mapping[str, npt.NDArray[np.bool_]] | None = None,
) -> bytes:
    """The blob of the module's docstring. looks: a code per GPU slot of each rack. shown: which
    GPUs a filter leaves; racks it does not name are left out, None for all."""
    if shown is not None:
        racks = {name: record for name, record in racks.items() if name in shown}
    records = list(racks.values())
    values = [_column(record, lens) for record in records]
    known = [column for column in values if column is not None]
    high = lens.high
    if high is None:
        present = [float(column[np.isfinite(column)].max(initial=0)) for column in known]
        high = max(present, default=0.0) or 1.0
        high = float(np.ceil(high / lens.rounded_to) * lens.rounded_to)
    head = {
        "racks": [_head(record) for record in records],
        "tray": TRAY,
        "palette": [look.data() for look in CELL_LOOKS.values()],
        "lens": {
            "id": lens.id,
            "unit": lens.unit,
            "low": lens.low,
            "high": high,
            "digits": lens.digits,
            "colour": lens.colour,
            "none": "" if any(map(_has_value, known)) else _nothing_known(lens, records),
        },
        "selected": selected,
        "over": FAILED,
    }
    encoded = json.dumps(head, ensure_ascii=False).encode()
    codes = b"".join(
        (looks[name] if shown is None else looks[name] | np.where(shown[name], 0, DIMMED))
        .astype(np.uint8)
        .tobytes()
        for name in racks
    )
    scaled = b"".join(
        _scale(column, record.num_gpus, lens.low, high)
        for record, column in zip(records, values, strict=True)
    )
    return struct.pack("<I", len(encoded)) + encoded + codes + scaled


def fleet_map(
    racks: Mapping[str, RackRecord],
    looks: Mapping[str, npt.NDArray[np.uint8]],
    lens: Lens,
    selected: str | None,
    key: str,
    shown: Mapping[str, npt.NDArray[np.bool_]] | None = None,
) -> str | None:
    """Draw the racks; returns the id of the GPU that was picked last."""
    blob = pack(racks, looks, lens, selected, shown)
    picked = mount("fleet", blob, key, on_gpu_change=_nothing).gpu
    return picked if isinstance(picked, str) else None


def _has_value(column: npt.NDArray[np.float32]) -> bool:
    return bool(np.isfinite(column).any())


def _nothing_known(lens: Lens, records: list[RackRecord]) -> str:
    """What stands in the legend where no GPU has a value."""
    if lens.column is None or not records:
        return ""
    if lens.id != "ecc":
        return "No data: no GPU has reported this yet."
    if all(record.emulated for record in records):
        return "No data: emulated devices have no memory that could count ECC errors."
    return "No data: no health source here counts ECC errors; NVML, nvidia-smi and DCGM do."


def _column(record: RackRecord, lens: Lens) -> npt.NDArray[np.float32] | None:
    if lens.column is None:
        return None
    values = record.column(lens.column) * np.float32(lens.scale)
    if not lens.relative:
        return values
    values = np.where(values > 0, values, np.float32(np.nan))
    middle = np.nanmedian(values) if np.isfinite(values).any() else np.nan
    return np.asarray(values / np.float32(middle), np.float32)


def _scale(column: npt.NDArray[np.float32] | None, gpus: int, low: float, high: float) -> bytes:
    if column is None:
        return np.full(gpus, NO_VALUE, "<u2").tobytes()
    share = np.clip((column - low) / max(high - low, 1e-9), 0, 1)
    codes = np.where(np.isfinite(column), np.nan_to_num(share) * (NO_VALUE - 1), NO_VALUE)
    return codes.round().astype("<u2").tobytes()


def _head(record: RackRecord) -> dict[str, object]:
    draw = float(np.nansum(record.column("power_w")))
    return {
        "name": record.rack,
        "gpus": record.num_gpus,
        "power": f"{watts(draw)} of {watts(record.budget_w)}",
        "share": round(draw / record.budget_w, 3) if record.budget_w > 0 else 0.0,
    }


def _nothing() -> None:
    """Streamlit hands out a component's state only where a callback is registered."""
