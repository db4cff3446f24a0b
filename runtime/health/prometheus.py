"""A Prometheus exposition in, one reading a GPU out: dcgm-exporter and nvidia_gpu_exporter. Pure.

Metrics that say nothing of health are passed over; lines that are no exposition are counted and
kept for showing.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from runtime.health.observation import NotUnderstood, clipped, normal_pci
from runtime.health.reading import RECOVERY_NAMES, SLOWDOWNS, THROTTLE_BITS, Reading

LINE_LIMIT = 16_384
GPU_LIMIT = 4096
XID_LIMIT = 256
KEPT_BAD = 100
# DCGM writes values near these for "no data".
_BLANK = 0x7FFFFFF0
_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(?P<labels>.*)\})?\s+(?P<value>[^\s{}]+)"
    r"(?:\s+-?\d+)?\s*"
)
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
# What must not be taken for a GPU's: the exporter's own state and its processes.
_FLAGS = {
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "remap_failure",
    "DCGM_FI_DEV_ROW_REMAP_PENDING": "remap_pending",
    "DCGM_FI_DEV_RETIRED_PENDING": "retirement_pending",
    "nvidia_smi_remapped_rows_failure": "remap_failure",
    "nvidia_smi_remapped_rows_pending": "remap_pending",
    "nvidia_smi_retired_pages_pending": "retirement_pending",
    "nvidia_smi_ecc_errors_uncorrected_aggregate_sram_threshold_exceeded": "ecc_threshold_exceeded",
    "nvidia_smi_reset_status_reset_required": "reset_required",
    "nvidia_smi_reset_status_drain_and_reset_recommended": "drain_recommended",
}
_NUMBERS = {
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "ecc_uncorrected",
    "nvidia_smi_ecc_errors_uncorrected_volatile_total": "ecc_uncorrected",
}
_GAUGES = {
    "DCGM_FI_DEV_GPU_TEMP": "temp_c",
    "DCGM_FI_DEV_POWER_USAGE": "power_w",
    "nvidia_smi_temperature_gpu": "temp_c",
    "nvidia_smi_power_draw_watts": "power_w",
}
_NVLINK = re.compile(r"DCGM_FI_DEV_NVLINK_(?:CRC_\w+|REPLAY|RECOVERY)_ERROR_COUNT_TOTAL")
_THROTTLE_MASKS = frozenset(
    {
        "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS",
        "DCGM_FI_DEV_CLOCKS_EVENT_REASONS",
        "nvidia_smi_clocks_event_reasons_active",
        "nvidia_smi_clocks_throttle_reasons_active",
    }
)
_XIDS = frozenset(
    {"DCGM_FI_DEV_XID_ERRORS", "DCGM_EXP_XID_ERRORS_COUNT", "DCGM_FI_DEV_XID_ERRORS_ACTIVE"}
)
_RECOVERY = frozenset({"DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION", "nvidia_smi_gpu_recovery_action"})


class _Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


class ExpositionReader:
    """Reads line by line; readings by what the exporter calls the GPU."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.num_not_understood = 0
        self.not_understood: deque[NotUnderstood] = deque(maxlen=KEPT_BAD)
        self._gpus: dict[str, Reading] = {}

    def read(self, lines: Iterable[str]) -> list[Reading]:
        """All readings of an exposition, in order of appearance."""
        for line in lines:
            self.feed(line)
        return list(self._gpus.values())

    def feed(self, line: str) -> None:
        self.num_lines += 1
        text = line.strip()
        if not text or text.startswith("#"):
            return
        sample = _parsed(text) if len(text) <= LINE_LIMIT else None
        if sample is None:
            self.num_not_understood += 1
            self.not_understood.append(
                NotUnderstood(
                    line=self.num_lines, text=clipped(text), reason="is no sample of an exposition"
                )
            )
            return
        if sample.name.startswith(("DCGM_", "nvidia_smi_")) and not math.isnan(sample.value):
            self._take(sample)

    def _take(self, sample: _Sample) -> None:
        labels = sample.labels
        key = labels.get("UUID") or labels.get("uuid") or labels.get("gpu") or ""
        if not key or "process_name" in labels:
            return
        gpu = self._gpus.get(key)
        if gpu is None:
            if len(self._gpus) >= GPU_LIMIT:
                return
            gpu = self._gpus[key] = Reading(line=self.num_lines)
        gpu.uuid = gpu.uuid or labels.get("UUID") or labels.get("uuid") or ""
        gpu.pci = gpu.pci or normal_pci(labels.get("pci_bus_id", ""))
        gpu.index = gpu.index or labels.get("gpu", "") or labels.get("index", "")
        gpu.serial = gpu.serial or labels.get("serial", "")
        if abs(sample.value) < _BLANK:
            _fill(gpu, sample)


def _fill(gpu: Reading, sample: _Sample) -> None:
    name, value = sample.name, sample.value
    if name in _FLAGS:
        setattr(gpu, _FLAGS[name], bool(getattr(gpu, _FLAGS[name])) or value > 0)
    elif name in _NUMBERS:
        setattr(gpu, _NUMBERS[name], max(int(value), getattr(gpu, _NUMBERS[name]) or 0))
    elif name in _GAUGES:
        setattr(gpu, _GAUGES[name], value)
    elif name in _XIDS:
        _fill_xid(gpu, sample)
    elif name in _RECOVERY:
        code = int(value)
        gpu.recovery = RECOVERY_NAMES[code] if 0 <= code < len(RECOVERY_NAMES) else f"{code}"
    elif name in _THROTTLE_MASKS:
        gpu.throttles |= {word for bit, word in THROTTLE_BITS.items() if int(value) & bit}
    elif _NVLINK.fullmatch(name):
        gpu.nvlink_errors = (gpu.nvlink_errors or 0) + max(0, int(value))
    else:
        reason = name.removeprefix("nvidia_smi_clocks_event_reasons_")
        reason = reason.removeprefix("nvidia_smi_clocks_throttle_reasons_")
        if reason in SLOWDOWNS and value > 0:
            gpu.throttles.add(reason)


def _fill_xid(gpu: Reading, sample: _Sample) -> None:
    """The last Xid, as the value; or one series for each Xid of a window, with its count."""
    if sample.name == "DCGM_FI_DEV_XID_ERRORS":
        xid, count = int(sample.value), 1
    else:
        word = sample.labels.get("xid", "")[:5]
        xid, count = int(word) if word.isascii() and word.isdigit() else 0, int(sample.value)
    if xid > 0 and count > 0 and len(gpu.xids) < XID_LIMIT:
        gpu.xids[xid] = max(count, gpu.xids.get(xid, 0))


def _parsed(text: str) -> _Sample | None:
    match = _SAMPLE.fullmatch(text)
    if match is None:
        return None
    labels: dict[str, str] = {}
    rest, position = match["labels"] or "", 0
    while position < len(rest):
        label = _LABEL.match(rest, position)
        if label is None:
            return None
        labels[label[1]] = label[2].replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\")
        position = label.end()
    try:
        value = float(match["value"])
    except ValueError:
        return None
    return _Sample(match["name"], labels, value if math.isfinite(value) else math.nan)
