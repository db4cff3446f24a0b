"""What a source reads of one GPU at one time, and what that argues for: one observation a GPU.

NVML, nvidia-smi and the exporters all come down to this reading; None means that the source does
not say. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from runtime.health.catalogue import Catalogue
from runtime.health.observation import (
    BADNESS,
    Observation,
    SourceKind,
    clipped,
    severity_of,
)
from runtime.health.xid_line import recovery_of
from storage.records import GpuState

# Throttle reasons that say the hardware cannot hold its clocks; a power cap or idling is no fault.
SLOWDOWNS = (
    "hw_thermal_slowdown",
    "sw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "hw_slowdown",
)
# nvmlDeviceGpuRecoveryAction_t
RECOVERY_NAMES = (
    "none",
    "gpu reset",
    "node reboot",
    "drain p2p",
    "drain and reset",
    "recover imex domain",
    "bus reset",
    "system reboot",
)
# NVML's bit mask of clock event (throttle) reasons.
THROTTLE_BITS = {
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}


class Reading(msgspec.Struct, kw_only=True):
    """One GPU at one time. throttles: names of SLOWDOWNS that are active. xids: how often each Xid
    was seen, once where the source knows the last one alone."""

    pci: str = ""
    uuid: str = ""
    serial: str = ""
    index: str = ""
    line: int | None = None
    lost: str = ""
    reset_required: bool | None = None
    drain_recommended: bool | None = None
    recovery: str | None = None
    ecc_uncorrected: int | None = None
    ecc_threshold_exceeded: bool | None = None
    remap_pending: bool | None = None
    remap_failure: bool | None = None
    retirement_pending: bool | None = None
    repair_pending: bool | None = None
    unrepairable_memory: bool | None = None
    read_error: bool | None = None
    fabric_degraded: bool | None = None
    fabric_unhealthy: bool | None = None
    nvlink_errors: int | None = None
    xids: dict[int, int] = msgspec.field(default_factory=dict)
    throttles: set[str] = msgspec.field(default_factory=set)
    temp_c: float | None = None
    power_w: float | None = None

    @property
    def name(self) -> str | None:
        """What the source calls the GPU: its address, else its UUID, else its index."""
        return self.pci or self.uuid or (f"gpu {self.index}" if self.index else None)


class Finding(NamedTuple):
    code: int | str
    verdict: GpuState
    action: str
    times: int = 1


# Flag of a reading -> what it argues for, and NVIDIA's action.
_FLAGS: tuple[tuple[str, GpuState, str], ...] = (
    ("reset_required", "failed", "RESET_GPU"),
    ("drain_recommended", "draining", "DRAIN_AND_RESET"),
    ("remap_failure", "draining", "CONTACT_SUPPORT"),
    ("ecc_threshold_exceeded", "draining", "CONTACT_SUPPORT"),
    ("unrepairable_memory", "draining", "CONTACT_SUPPORT"),
    ("remap_pending", "suspect", "RESET_GPU"),
    ("repair_pending", "suspect", "RESET_GPU"),
    ("read_error", "suspect", "CONTACT_SUPPORT"),
    ("fabric_degraded", "suspect", "INVESTIGATE_LINK"),
    ("fabric_unhealthy", "suspect", "INVESTIGATE_LINK"),
    ("retirement_pending", "suspect", "RESET_GPU"),
)
_CODES = {"remap_failure": "row_remap_failure", "remap_pending": "row_remap_pending"}
_COUNTERS: tuple[tuple[str, GpuState, str], ...] = (
    ("ecc_uncorrected", "suspect", "RESET_GPU"),
    ("nvlink_errors", "suspect", "INVESTIGATE_LINK"),
)


def findings(reading: Reading, catalogue: Catalogue) -> list[Finding]:
    """All that speaks against the GPU, worst first."""
    found: list[Finding] = []
    if reading.lost:
        found.append(Finding("gpu_lost", "failed", "RESTART_BM"))
    if reading.recovery is not None:
        known = recovery_of(reading.recovery)
        if known is None:
            found.append(Finding("recovery_action", "suspect", reading.recovery[:40]))
        elif known[0] != "healthy":
            found.append(Finding("recovery_action", known[0], known[1]))
    found += [
        Finding(_CODES.get(name, name), verdict, action)
        for name, verdict, action in _FLAGS
        if getattr(reading, name)
    ]
    found += [Finding(name, "degraded", "CHECK_MECHANICALS") for name in sorted(reading.throttles)]
    found += [
        Finding(name, verdict, action, getattr(reading, name))
        for name, verdict, action in _COUNTERS
        if getattr(reading, name)
    ]
    for xid, times in sorted(reading.xids.items()):
        entry = catalogue.entry(xid)
        found.append(Finding(xid, entry.verdict, entry.immediate, times))
    return sorted(found, key=lambda each: -BADNESS[each.verdict])


def judge(
    reading: Reading, source: SourceKind, catalogue: Catalogue, *, at: float | None = None
) -> Observation:
    """The reading as one observation: its worst finding, with the others named beside it."""
    found = findings(reading, catalogue)
    worst = found[0] if found else None
    others = ", ".join(str(each.code) for each in found[1:])
    verdict: GpuState = worst.verdict if worst is not None else "healthy"
    said = "; ".join(f"{each.code} ({each.times})" for each in found) or "nothing against it"
    return Observation(
        source=source,
        gpu=reading.name,
        pci=reading.pci,
        code=worst.code if worst is not None else None,
        subcode=others or None,
        severity=severity_of(verdict),
        verdict=verdict,
        action=worst.action if worst is not None else "",
        count=worst.times if worst is not None else 1,
        line=reading.line,
        at=at,
        text=clipped(f"{said}; {reading.lost}" if reading.lost else said),
        snapshot=True,
        ecc=reading.ecc_uncorrected,
    )
