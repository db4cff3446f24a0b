"""What a source saw of one GPU: one frozen record, whatever the source.

An observation says what the source saw and what it alone argues for; what becomes of the GPU is the
verdict book's to decide. Pure: no clock, no source, no store.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from storage.records import GpuState, Severity

SourceKind = Literal[
    "kernel_log", "nvidia_smi", "prometheus", "nvml", "worker", "step_times", "report", "webhook"
]
TEXT_LIMIT = 400
# How bad a state is; the worst of what holds is the verdict.
BADNESS: dict[GpuState, int] = {
    "healthy": 0, "suspect": 1, "degraded": 2, "repairing": 3, "draining": 4, "failed": 5,
}  # fmt: skip

_PCI = re.compile(
    r"(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{1,2}):(?P<device>[0-9a-f]{1,2})"
    r"(?:\.(?P<function>[0-7]))?",
    re.IGNORECASE,
)


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One event, or the state of one GPU, as a source saw it.

    gpu: `rack/slot` where the source's address is mapped, else what it calls the GPU (UUID or PCI
        address); None when it does not say.
    pci: normalised address, "" when unknown.
    code: Xid or SXid number, or a word for what has none ("ecc_uncorrected"); None: nothing wrong.
    subcode: what the driver decoded beyond the code. cause_of: the Xid that this one follows from.
    verdict: what this alone argues for. action: in the words of NVIDIA's catalogue.
    count: how often it happened. line: 1-based line of a file, None without one.
    at: seconds since the epoch, None when the source does not say.
    snapshot: the source's whole word on this GPU now; it replaces what the source said before.
    ecc: uncorrected ECC errors it counts, None where the source does not say.
    """

    source: SourceKind
    gpu: str | None = None
    pci: str = ""
    code: int | str | None = None
    subcode: str | None = None
    cause_of: int | None = None
    severity: Severity = "info"
    verdict: GpuState = "healthy"
    action: str = ""
    count: int = 1
    line: int | None = None
    at: float | None = None
    text: str = ""
    snapshot: bool = False
    ecc: int | None = None

    @property
    def is_sxid(self) -> bool:
        """It is of an NVSwitch: NVIDIA numbers those from 10000."""
        return isinstance(self.code, int) and self.code >= 10_000


class NotUnderstood(msgspec.Struct, frozen=True, kw_only=True):
    """A line that looked as if it mattered and was not understood; shown, never guessed."""

    line: int
    text: str
    reason: str


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a source says of which GPU sits at an address; "" where it does not say."""

    pci: str
    uuid: str = ""
    serial: str = ""


def severity_of(verdict: GpuState) -> Severity:
    """How loudly to tell of a verdict."""
    badness = BADNESS[verdict]
    if badness >= BADNESS["draining"]:
        return "critical"
    return "info" if badness == 0 else "warning"


def normal_pci(text: str) -> str:
    """A PCI address as Linux writes it (`0000:9b:00.0`), from any width, "" when it is none."""
    match = _PCI.fullmatch(text.strip())
    if match is None:
        return ""
    domain = int(match["domain"] or "0", 16)
    return (
        f"{domain:04x}:{int(match['bus'], 16):02x}:{int(match['device'], 16):02x}."
        f"{match['function'] or '0'}"
    )


def clipped(text: str) -> str:
    """Text bounded for records and screens."""
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 1] + "…"
