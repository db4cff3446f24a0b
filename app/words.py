"""Numbers and names as they stand on screen: units, a fixed number of digits, glossary words.

Pure text; knows neither Streamlit nor a store.
"""

from __future__ import annotations

import math

from storage.records import ActionKind

DASH = "–"

ACTION_WORDS: dict[ActionKind, str] = {
    "carry_on": "carry on",
    "drop": "drop",
    "shrink": "shrink",
    "shrink_boost": "shrink and boost",
    "grow": "grow",
    "replace": "put a spare into",
    "restart": "restart the run for",
}


def number(value: float | None, digits: int = 0) -> str:
    """`12 345.6`: thousands apart by a thin space, a fixed number of digits; a dash for nothing."""
    if value is None:
        return DASH
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{digits}f}".replace(",", " ")


def percent(share: float | None, digits: int = 1) -> str:
    """`98.2 %` from 0.982; never rounds something below 1 up to 100 %."""
    if share is None or not math.isfinite(share):
        return DASH
    text = f"{100 * share:.{digits}f}"
    if share < 1 and text == f"{100:.{digits}f}":
        text = f"{100 - 10**-digits:.{digits}f}"
    return f"{text} %"


def seconds(value: float | None) -> str:
    """`0.84 s`, `12.3 s`, `4 min 05 s`, `2 h 10 min`."""
    if value is None or not math.isfinite(value):
        return DASH
    if value < 10:
        return f"{value:.2f} s"
    if value < 60:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{int(value // 60)} min {int(value % 60):02d} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60):02d} min"


def watts(value: float) -> str:
    """`680 W` below 10 kW, `12.4 kW` from there."""
    return f"{value / 1000:.1f} kW" if value >= 10_000 else f"{value:.0f} W"


def params(count: int) -> str:
    """`3.1M parameters`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{unit} parameters"
    return f"{count} parameters"


def gpu_hours(value: float) -> str:
    """`12.3 GPU-h`; small costs keep four digits behind the point."""
    return f"{number(value, 1 if value >= 10 else 4)} GPU-h"


def bare_device(device: str) -> str:
    """`B200` from `emulated B200`: a chip beside it says that it is emulated."""
    return device.removeprefix("emulated ")


def device_words(device: str, emulated: bool) -> str:
    """`B200, emulated`: said once, wherever it stands."""
    return f"{bare_device(device)}, emulated" if emulated else device


def split_title(title: str) -> tuple[str, str]:
    """An option's title as (what is done, what is to be said of it)."""
    short, _, detail = title.partition(": ")
    return short, detail


def plural(count: int, one: str, many: str | None = None) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{count} {one if count == 1 else many or one + 's'}"
