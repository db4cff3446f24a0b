"""`nvidia-smi -q -x` in, one reading a GPU out: streaming, and safe against hostile XML.

Entities are refused before they expand, the external DTD is never fetched, and size, depth and text
are bounded. Pure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from xml.parsers import expat

from runtime.errors import CounterpoiseError
from runtime.health.observation import NotUnderstood, clipped, normal_pci
from runtime.health.reading import SLOWDOWNS, Reading

SIZE_LIMIT = 64 << 20
DEPTH_LIMIT = 48
TEXT_LIMIT = 4096
GPU_LIMIT = 1024
KEPT_BAD = 100
_LOST = re.compile(r"(?i)gpu is lost")
# One sensor that cannot be read is no lost GPU.
_UNREADABLE = re.compile(r"(?i)unknown error|err!")
_RESET = re.compile(r"(?i)gpu requires (?:a )?reset")
_VOID = frozenset(
    {"", "n/a", "[n/a]", "none", "unknown", "[not supported]", "not supported",
     "requested functionality has been deprecated"}
)  # fmt: skip
# What it prints outside the XML of a GPU that it cannot open; its index may come first.
_NO_HANDLE = re.compile(
    r"Unable to determine the device handle for (?:GPU|gpu)\s*(?:\d{1,3}:\s+)?"
    r"([0-9a-fA-F]{4,8}:[0-9a-fA-F:.]{4,12})?:?\s*(.{0,200})"
)
_OUTSIDE_BYTES = 65_536

_FLAGS = {
    "reset_required": "reset_required",
    "drain_and_reset_recommended": "drain_recommended",
    "remapped_row_pending": "remap_pending",
    "remapped_row_failure": "remap_failure",
    "pending_retirement": "retirement_pending",
    "channel_repair_pending": "repair_pending",
    "tpc_repair_pending": "repair_pending",
    "unrepairable_memory": "unrepairable_memory",
    "route_unhealthy": "fabric_unhealthy",
}


_JUNK = expat.errors.codes[expat.errors.XML_ERROR_JUNK_AFTER_DOC_ELEMENT]


class SmiError(CounterpoiseError):
    """Not the XML of nvidia-smi, or not one that may be read."""


class SmiReader:
    """Feed it chunks; it keeps one reading a GPU.

    not_understood holds values that should be numbers or yes and no, and are neither.
    """

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.not_understood: list[NotUnderstood] = []
        self._parser = expat.ParserCreate()
        self._parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._characters
        self._parser.EntityDeclHandler = self._entity
        self._path: list[str] = []
        self._text: list[str] = []
        self._text_size = 0
        self._size = 0
        self._gpu: Reading | None = None
        self._ecc: dict[str, int] = {}
        self._lines_before = 0
        # Line at which the document was over and something else began.
        self._after: int | None = None
        self._tail = b""

    def read(self, chunks: Iterable[bytes]) -> list[Reading]:
        """All readings of a document.

        Raises:
            SmiError: not well-formed, too large, too deep, with entities, or another document.
        """
        head, rest = self._before_xml(iter(chunks))
        try:
            for chunk in rest:
                self._parse(chunk)
            if self._after is None:
                self._parser.Parse(b"", True)
            else:
                self._outside(self._tail.decode("utf-8", "replace"), self._after)
        except expat.ExpatError as error:
            why = f"the XML is not well-formed: {error}"
            if self.readings and not self._size:
                return self.readings
            raise SmiError(f"{why}; it begins with {clipped(head)!r}" if head else why) from error
        return self.readings

    # outside the XML -------------------------------------------------------------------------

    def _before_xml(self, chunks: Iterator[bytes]) -> tuple[str, Iterable[bytes]]:
        """What is printed before the XML, and the rest: complaints about GPUs come first."""
        head = b""
        for chunk in chunks:
            head += chunk
            if b"<" in head or len(head) > _OUTSIDE_BYTES:
                break
        begin = head.find(b"<")
        before, xml = (head, b"") if begin < 0 else (head[:begin], head[begin:])
        text = before.decode("utf-8", "replace").lstrip("\ufeff")
        self._outside(text, 1)
        self._lines_before = before.count(b"\n")
        return text.strip(), itertools.chain([xml] if xml else [], chunks)

    def _parse(self, chunk: bytes) -> None:
        """Feed the parser; what follows the document is no part of it."""
        self._size += len(chunk)
        if self._size > SIZE_LIMIT:
            raise SmiError(f"the XML is larger than {SIZE_LIMIT >> 20} MiB")
        if self._after is None:
            try:
                self._parser.Parse(chunk, False)
                return
            except expat.ExpatError as error:
                if error.code != _JUNK or self._path:
                    raise
            self._after = self._line
            begin = self._parser.ErrorByteIndex - (self._size - len(chunk))
            chunk = chunk[max(0, begin) :]
        self._tail += chunk[: _OUTSIDE_BYTES - len(self._tail)]

    def _outside(self, text: str, first_line: int) -> None:
        for number, line in enumerate(text.splitlines(), first_line):
            lost = _NO_HANDLE.search(line)
            if lost is not None and len(self.readings) < GPU_LIMIT:
                pci = normal_pci((lost[1] or "").strip(":"))
                self.readings.append(Reading(pci=pci, lost=clipped(line.strip()), line=number))
            elif line.strip() and len(self.not_understood) < KEPT_BAD:
                self.not_understood.append(
                    NotUnderstood(line=number, text=clipped(line.strip()), reason="is no XML")
                )

    @property
    def _line(self) -> int:
        return self._parser.CurrentLineNumber + self._lines_before

    # handlers --------------------------------------------------------------------------------

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if not self._path and name != "nvidia_smi_log":
            raise SmiError(f"the XML is a <{clipped(name)}>, not an <nvidia_smi_log>")
        if len(self._path) >= DEPTH_LIMIT:
            raise SmiError(f"the XML is nested deeper than {DEPTH_LIMIT}")
        self._path.append(name)
        self._text, self._text_size = [], 0
        if self._path == ["nvidia_smi_log", "gpu"]:
            if len(self.readings) >= GPU_LIMIT:
                raise SmiError(f"the XML names more than {GPU_LIMIT} GPUs")
            self._gpu = Reading(pci=normal_pci(attributes.get("id", "")), line=self._line)
            self._ecc = {}
            self.readings.append(self._gpu)

    def _end(self, _name: str) -> None:
        if self._gpu is not None and len(self._path) > 2:
            self._value(self._gpu, self._path[2:], "".join(self._text).strip())
        self._path.pop()
        self._text, self._text_size = [], 0
        if len(self._path) == 1 and self._gpu is not None:
            self._gpu.ecc_uncorrected = self._uncorrected()
            self._gpu = None

    def _characters(self, data: str) -> None:
        if self._text_size < TEXT_LIMIT:
            self._text.append(data[: TEXT_LIMIT - self._text_size])
            self._text_size += len(data)

    def _entity(self, *_args: object) -> None:
        raise SmiError("the XML declares entities; nvidia-smi's never does")

    # values ----------------------------------------------------------------------------------

    def _value(self, gpu: Reading, path: list[str], text: str) -> None:
        if not text or path[0] in ("mig_devices", "processes", "supported_clocks"):
            return
        if _RESET.search(text):
            gpu.reset_required = True
        elif _LOST.search(text):
            gpu.lost = gpu.lost or clipped(text)
        elif _UNREADABLE.search(text):
            gpu.read_error = True
        name = path[-1]
        if name in _FLAGS:
            setattr(gpu, _FLAGS[name], getattr(gpu, _FLAGS[name]) or self._flag(text))
        elif path[0] == "ecc_errors":
            self._ecc_value(gpu, path, text)
        elif path == ["temperature", "gpu_temp"]:
            gpu.temp_c = self._number(text)
        elif name in ("power_draw", "instant_power_draw", "average_power_draw"):
            gpu.power_w = gpu.power_w if gpu.power_w is not None else self._number(text)
        elif path == ["fabric", "health", "bandwidth"]:
            gpu.fabric_degraded = text.lower() == "degraded"
        elif path[0] in ("clocks_event_reasons", "clocks_throttle_reasons"):
            reason = name.rpartition("_reason_")[2]
            if reason in SLOWDOWNS and self._flag(text):
                gpu.throttles.add(reason)
        else:
            _identify(gpu, path, text)

    def _ecc_value(self, gpu: Reading, path: list[str], text: str) -> None:
        name = path[-1]
        if "threshold" in name:
            gpu.ecc_threshold_exceeded = self._flag(text)
        elif len(path) > 1 and path[1] == "volatile":
            uncorrectable = "uncorrectable" in name
            total_of_old = len(path) > 3 and path[2] == "double_bit" and name == "total"
            if uncorrectable or total_of_old:
                number = self._number(text)
                if number is not None:
                    self._ecc["/".join(path[2:])] = int(number)

    def _uncorrected(self) -> int | None:
        return sum(self._ecc.values()) if self._ecc else None

    def _flag(self, text: str) -> bool | None:
        word = text.lower()
        if word in ("yes", "active", "true"):
            return True
        if word in ("no", "not active", "false"):
            return False
        if word not in _VOID:
            self._bad(text, "is neither yes nor no")
        return None

    def _number(self, text: str) -> float | None:
        word = text.split(" ", 1)[0]
        if text.lower() in _VOID:
            return None
        if not re.fullmatch(r"-?\d{1,18}(?:\.\d{1,9})?", word):
            self._bad(text, "is not a number")
            return None
        return float(word)

    def _bad(self, text: str, reason: str) -> None:
        told = _LOST.search(text) or _RESET.search(text) or _UNREADABLE.search(text)
        if told or len(self.not_understood) >= KEPT_BAD:
            return
        where = "/".join(self._path)
        self.not_understood.append(
            NotUnderstood(line=self._line, text=clipped(f"{where}: {text}"), reason=reason)
        )


def _identify(gpu: Reading, path: list[str], text: str) -> None:
    if path == ["uuid"]:
        gpu.uuid = text[:64]
    elif path == ["serial"]:
        gpu.serial = "" if text.lower() in _VOID else text[:64]
    elif path == ["pci", "pci_bus_id"] and not gpu.pci:
        gpu.pci = normal_pci(text)
    elif path[-1] in ("gpu_recovery_action", "recovery_action"):
        gpu.recovery = None if text.lower() in _VOID - {"none"} else text[:60]
