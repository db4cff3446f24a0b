"""NVLink errors as the driver prints them: Xid 74 with its registers, Xid 144 to 150 with IntrInfo.

What the bits ask for is NVIDIA's public guidance (WORKFLOW_NVLINK_ERR, "Xid 144-150 Decode"). What
it does not name is not guessed: then the message's own "fatal" decides. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

from runtime.errors import CounterpoiseError
from storage.records import GpuState

_LINK = re.compile(r"\blink\s+(\d{1,3})\s*(?:\(([0-9a-fx ,]{0,160})\))?", re.IGNORECASE)
_NVLINK5 = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_/]{2,40}(?:\s[A-Z][a-z]{2,20})?)\s+(?P<severity>Non-?fatal|Fatal)\s+"
    r"XC\s?(?P<xc>\d)\s+i\s?(?P<injected>\d)\s+Link\s+(?P<link>-?\d{1,3})"
    r"\s*(?:[(\[](?P<words>[0-9a-fx ,]{0,160})[)\]])?",
    re.IGNORECASE,
)
_WORD = re.compile(r"0x[0-9a-f]{1,8}", re.IGNORECASE)
_NO_STATUS = "-"
# Error statuses of these are values; those of the others are bits.
_BY_VALUE = frozenset({149, 150})

# What a bit of Xid 74 means -> (verdict, action). Register (1 to 7) -> bit -> meaning.
_MEANINGS: dict[str, tuple[GpuState, str]] = {
    "to be ignored": ("healthy", "IGNORE"),
    "ECC threshold, corrected": ("healthy", "IGNORE"),
    "secondary": ("suspect", "WORKFLOW_NVLINK_ERR"),
    "ECC or parity": ("suspect", "WORKFLOW_NVLINK_ERR"),
    "to be reported": ("suspect", "CONTACT_SUPPORT"),
    "to be diagnosed": ("suspect", "CONTACT_SUPPORT"),
    "connection": ("draining", "CHECK_MECHANICALS"),
    "signal integrity": ("draining", "CHECK_MECHANICALS"),
    "fabric reset": ("draining", "RESET_GPUS_AND_NVSWITCHES"),
}
_REGISTERS: dict[int, dict[int, str]] = {
    1: {
        **dict.fromkeys((0, 23, 30), "to be ignored"),
        **dict.fromkeys((1, 20), "secondary"),
        **dict.fromkeys((4, 5), "ECC or parity"),
        **dict.fromkeys((8, 9, 12, 16, 17, 24, 28), "connection"),
        **dict.fromkeys((21, 22), "signal integrity"),
        **dict.fromkeys((27, 29), "to be reported"),
    },
    3: {
        **dict.fromkeys((0, 1, 2, 6), "ECC or parity"),
        **dict.fromkeys((13, 17, 18), "to be reported"),
        **dict.fromkeys((16, 19), "to be diagnosed"),
    },
    4: {**dict.fromkeys((16, 17), "secondary"), 18: "fabric reset"},
    5: {
        **dict.fromkeys((18, 19, 21, 22, 24, 25, 27, 28), "ECC or parity"),
        **dict.fromkeys((20, 23, 26, 29), "ECC threshold, corrected"),
    },
}
_ORDER = tuple(_MEANINGS)


class NvlinkError(NamedTuple):
    """A decoded message. subcode: None when it says nothing beyond its number. verdict, action:
    None and "" where the catalogue's word on the Xid stands."""

    subcode: str | None
    verdict: GpuState | None
    action: str


class _Row(NamedTuple):
    """One line of the package's table."""

    xid: int
    units: tuple[str, ...]
    info: tuple[int, int]
    reason: int
    status: int | None
    action: str
    investigatory: str
    severity: str
    promoted: str


def decode_74(body: str) -> NvlinkError:
    """An error of NVLink up to 4: the link, and the worst that its registers name.

    NVIDIA explains the registers for Hopper. A fatal error has cost the link whatever they say: it
    is a reason to drain, unless all of them may be ignored.
    """
    found = _LINK.search(body)
    if found is None:
        return NvlinkError(None, _by_words(body), "")
    name = f"link {int(found[1])}"
    registers = [int(word, 16) for word in _WORD.findall(found[2] or "")]
    bits = [
        (number, bit)
        for number, register in enumerate(registers, 1)
        for bit in range(32)
        if register >> bit & 1
    ]
    meanings = {_REGISTERS.get(number, {}).get(bit, "") for number, bit in bits}
    if bits:
        name += "".join(f", register {number} bit {bit}" for number, bit in bits[:4])
    if not bits or "" in meanings or len(registers) != 7:
        return NvlinkError(name, _by_words(body), "")
    worst = max(meanings, key=_ORDER.index)
    verdict, action = _MEANINGS[worst]
    if verdict == "suspect" and _by_words(body) == "draining":
        verdict = "draining"
    return NvlinkError(f"{name}: {worst}", verdict, action)


def decode_nvlink5(xid: int, body: str) -> NvlinkError:
    """An error of NVLink 5 (Xid 144 to 150): unit, severity, link, and what its bits ask for."""
    found = _NVLINK5.search(body)
    if found is None:
        return NvlinkError(None, None, "")
    unit, is_fatal = " ".join(found["unit"].split()), found["severity"].lower() == "fatal"
    words = _WORD.findall(found["words"] or "")
    subcode = f"{unit} {'fatal' if is_fatal else 'nonfatal'} link {int(found['link'])}"
    if words:
        subcode += f" {words[0]}"
    if found["injected"] != "0":
        return NvlinkError(f"{subcode} injected", "healthy", "IGNORE")
    info, status = ([int(word, 16) for word in words] + [0, 0])[:2]
    rows = _matching(xid, unit, info, status) if len(words) >= 2 else []
    if not rows or (is_fatal and all(row.severity == "nonfatal" for row in rows)):
        return NvlinkError(subcode, "draining" if is_fatal else "suspect", "")
    worst = max(rows, key=lambda row: ("IGNORE", "XID_154_EVAL", "RESET_GPU").index(row.action))
    if worst.status:
        subcode += f" status {status:#x}"
    elif xid == 149 and worst.reason:
        subcode += f" reason {worst.reason}"
    if worst.action == "RESET_GPU":
        # A fatal link leaves the GPU to its jobs until they are drained; a fatal GPU does not.
        verdict: GpuState = "draining" if worst.severity == "link_fatal" else "failed"
    else:
        harmless = worst.action == worst.investigatory == "IGNORE"
        verdict = "healthy" if harmless else "suspect"
    return NvlinkError(f"{subcode}: {worst.investigatory}", verdict, worst.action)


def _by_words(body: str) -> GpuState:
    words = body.lower().replace("-", "")
    return "draining" if "fatal" in words and "nonfatal" not in words else "suspect"


def _matching(xid: int, unit: str, info: int, status: int) -> list[_Row]:
    """Rows for a message, [] when any part of it has none."""
    layouts = [
        (row, version)
        for row in _table()
        if row.xid == xid and unit.upper() in row.units and row.reason == info >> 20 & 0x3F
        for version, mask in enumerate((0x3FF, 0x7F))
        if info & mask == row.info[version]
    ]
    if xid in _BY_VALUE:
        fitting = [each for each in layouts if each[0].status in (None, status)]
    else:
        fitting = [each for each in layouts if each[0].status is None or each[0].status & status]
        named = 0
        for row, _ in fitting:
            named |= row.status or status
        if status & ~named:
            return []
    return [_promoted(row, info, version) for row, version in fitting]


def _promoted(row: _Row, info: int, version: int) -> _Row:
    """The row as a promoted error has it, where the message says that it was promoted."""
    is_promoted = row.promoted != _NO_STATUS and info >> (10, 7)[version] & 1
    return row._replace(action=row.promoted, severity="fatal") if is_promoted else row


@cache
def _table() -> Sequence[_Row]:
    """The package's table.

    Raises:
        CounterpoiseError: the file is damaged.
    """
    text = resources.files("runtime.health").joinpath("nvlink_catalogue.tsv").read_text("utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    rows = []
    for line in lines[1:]:
        fields = line.split("\t")
        if len(fields) != 10:
            raise CounterpoiseError(f"nvlink_catalogue.tsv: cannot read {line!r}")
        xid, units, v1, v2, reason, status, action, investigatory, severity, promoted = fields
        rows.append(
            _Row(
                int(xid),
                tuple(unit.upper() for unit in units.split("/")),
                (int(v1, 16), int(v2, 16)),
                int(reason),
                None if status == _NO_STATUS else int(status, 16),
                action,
                investigatory,
                severity,
                promoted,
            )
        )
    return rows
