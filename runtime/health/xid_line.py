"""The body of one Xid or SXid message, decoded as far as the driver decodes it. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from runtime.health.nvlink import decode_74, decode_nvlink5
from runtime.health.observation import normal_pci
from storage.records import GpuState

_XID = re.compile(
    r"NVRM:?\s+(?:GPU\d+:?\s+)?Xid\s*:?\s*"
    r"(?:\(\s*(?:PCI:)?(?P<pci>[0-9a-fA-F:.]{4,20})(?:\s+GPU-I:\w{1,8})?\s*\)\s*:?\s*)?"
    r"(?P<code>\d{1,4})(?!\w)\s*(?:[,:]\s*)?(?P<rest>.*)",
    re.DOTALL,
)
_SXID = re.compile(
    r"(?P<switch>nvidia-nvswitch\d{1,3}):?\s+SXid\s*\(\s*(?:PCI:)?(?P<pci>[0-9a-fA-F:.]{4,20})\s*\)"
    r"\s*:?\s*(?P<code>\d{1,6})(?!\w)\s*(?:,\s*)?(?P<rest>.*)",
    re.DOTALL,
)
_PROCESS = re.compile(
    r"\s*(?:pid\s*=\s*(?:'?<[^>]{0,40}>'?|'?-?\d{1,10}'?)\s*(?:,\s*|$))?"
    r"(?:name\s*=\s*[^,]{0,120}(?:,\s*|$))?"
)
_CAUSE = re.compile(r"caused by previous Xid\s+(\d{1,4})", re.IGNORECASE)
_RECOVERY = re.compile(
    r"recovery action changed from\s+(0x[0-9a-f]+)\s*\(([^)]{0,60})\)\s+to\s+"
    r"(0x[0-9a-f]+)\s*\(([^)]{0,60})\)",
    re.IGNORECASE,
)
_LINK = re.compile(r"\blink\s+(\d{1,3})", re.IGNORECASE)
_FUNCTION = re.compile(r"function\s+(\d{1,6})\s*(?:\((\w{1,60})\))?", re.IGNORECASE)
_CONTAINED = re.compile(r"(?:Unc|C)ontained\s*:\s*([^.]{1,80})", re.IGNORECASE)


# What NVIDIA's Fabric Manager guide calls always fatal to the whole fabric: the host must restart.
_ALWAYS_FATAL = frozenset({10003, 12020, 22003, 22011, *range(23001, 23018)})


class Decoded(NamedTuple):
    """What one message says. verdict: where its details rule over the catalogue, else None."""

    is_switch: bool
    code: int
    pci: str
    subcode: str | None
    cause_of: int | None
    verdict: GpuState | None
    action: str
    text: str


# What NVML and Xid 154 call the recovery action: word -> (verdict, action).
RECOVERY: dict[str, tuple[GpuState, str]] = {
    "none": ("healthy", "IGNORE"),
    # The short forms are nvidia-smi's.
    "reset": ("failed", "RESET_GPU"),
    "reboot": ("failed", "RESTART_BM"),
    "gpu reset": ("failed", "RESET_GPU"),
    "gpu reset required": ("failed", "RESET_GPU"),
    "node reboot": ("failed", "RESTART_BM"),
    "node reboot required": ("failed", "RESTART_BM"),
    "drain p2p": ("draining", "DRAIN_P2P"),
    "drain and reset": ("draining", "DRAIN_AND_RESET"),
    "recover imex domain": ("draining", "RECOVER_IMEX_DOMAIN"),
    "bus reset": ("failed", "BUS_RESET"),
    "system reboot": ("failed", "RESTART_BM"),
}


def recovery_of(word: str) -> tuple[GpuState, str] | None:
    """Verdict and action of a recovery action's name, None when it is not known."""
    name = re.sub(r"[\s_-]+", " ", word).strip().lower()
    return RECOVERY.get(name) or RECOVERY.get(name.removesuffix(" required"))


def decode_line(text: str) -> Decoded | None:
    """Decode a message without its prefix; None when it is no complete Xid or SXid."""
    match = _XID.search(text)
    if match is not None:
        pci = normal_pci(match["pci"]) if match["pci"] else ""
        if match["pci"] and not pci:
            return None
        return _decoded_xid(int(match["code"]), pci, match["rest"], text)
    match = _SXID.search(text)
    if match is None or not normal_pci(match["pci"]):
        return None
    return _decoded_sxid(match, text)


def cause_in(text: str) -> int | None:
    """The Xid that a message says it was caused by."""
    match = _CAUSE.search(text)
    return int(match[1]) if match is not None else None


def _decoded_xid(code: int, pci: str, rest: str, text: str) -> Decoded:
    process = _PROCESS.match(rest)
    body = rest[process.end() :] if process is not None else rest
    subcode: str | None = None
    verdict: GpuState | None = None
    action = ""
    if code == 154:
        subcode, verdict, action = _recovery(body)
    elif 144 <= code <= 150:
        subcode, verdict, action = decode_nvlink5(code, body)
    elif code == 74:
        subcode, verdict, action = decode_74(body)
    elif code in (119, 120):
        function = _FUNCTION.search(body)
        if function is not None:
            subcode = f"{function[1]} {function[2]}" if function[2] else function[1]
    elif code in (94, 95):
        place = _CONTAINED.search(body)
        subcode = place[1].strip() if place is not None else None
    elif code in (63, 64):
        subcode = _retirement(body)
    return Decoded(False, code, pci, subcode, cause_in(body), verdict, action, text)


def _recovery(body: str) -> tuple[str | None, GpuState | None, str]:
    match = _RECOVERY.search(body)
    word = match[4] if match is not None else body.strip().rstrip(".")
    known = recovery_of(word)
    if known is None:
        return (word[:60] or None), "suspect", ""
    return word.strip(), known[0], known[1]


def _retirement(body: str) -> str | None:
    lower = body.lower()
    if "remap" in lower:
        return "row remap pending" if "reset" in lower or "marked" in lower else "row remap"
    return "page retirement" if "retire" in lower else None


def _decoded_sxid(match: re.Match[str], text: str) -> Decoded:
    code, rest = int(match["code"]), match["rest"]
    severity = rest.lower().replace("-", "")
    link = _LINK.search(rest)
    verdict: GpuState | None = "suspect" if severity.startswith("nonfatal") else None
    action = ""
    if code in _ALWAYS_FATAL:
        verdict, action = "failed", "RESTART_BM"
    elif severity.startswith("fatal"):
        verdict, action = "draining", "RESET_GPUS_AND_NVSWITCHES"
    return Decoded(
        is_switch=True,
        code=code,
        pci=normal_pci(match["pci"]),
        subcode=match["switch"] + (f" link {int(link[1])}" if link is not None else ""),
        cause_of=None,
        verdict=verdict,
        action=action,
        text=text,
    )
