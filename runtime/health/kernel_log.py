"""Kernel log in, observations out: streaming, with bounded memory, in any of the field's forms.

It joins wrapped lines, tells an Xid that only follows another one, and knows a GPU that fell off
the bus without an Xid number. A line that names an Xid and cannot be read is counted and kept for
showing; nothing is guessed. Call `flush` when the log pauses: the last line may still be held.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from runtime.health.catalogue import Catalogue
from runtime.health.kernel_prefix import Message, split_prefix
from runtime.health.observation import (
    Identity,
    NotUnderstood,
    Observation,
    clipped,
    normal_pci,
    severity_of,
)
from runtime.health.xid_line import Decoded, cause_in, decode_line

LINE_LIMIT = 8192
KEPT_BAD = 100
KEPT_GPUS = 1024
# A follower comes within this long (or this many lines, where times cannot be read) of its cause.
FOLLOW_S = 60.0
FOLLOW_LINES = 200
JOIN_LINES = 4
# Cleaning up after these ends jobs, and that shows as further Xids: NVIDIA's "not solo" Xid 45.
_CAUSES = frozenset(
    {46, 48, 62, 64, 74, 79, 94, 95, 109, 119, 120, 136, 140, 143, *range(144, 151)}
)
_FOLLOWERS = frozenset({45, 154})
_MENTIONS = ("NVRM", "SXid", "Xid")
_XID_WORD = re.compile(r"\bS?Xid\b")
_GPU_AT = re.compile(r"NVRM: GPU at (?:PCI:)?([0-9a-fA-F:.]{4,20}): (GPU-[0-9a-fA-F-]{8,40})")
_SERIAL = re.compile(r"NVRM: GPU Board Serial Number: (\w{4,32})")
_FELL_OPENS = re.compile(r"The NVIDIA (?:probed )?GPU ([0-9a-fA-F:.]{4,20})")
_FELL_ONE_LINE = re.compile(
    r"NVRM: GPU (?:at )?(?:PCI:)?([0-9a-fA-F:.]{4,20}): .{0,40}fallen off the bus", re.IGNORECASE
)
_SXID_DETAIL = re.compile(r"SXid\s*\([^)]*\)\s*:?\s*\d+\s*,\s*(?:Severity|Data)\b")
_REPEATED = re.compile(r"(?:last message|message) repeated (\d{1,6}) times")


@dataclass(slots=True)
class _Held:
    """A message that the next lines may go on with."""

    line: int
    at: float | None
    text: str
    joined: int = 1


@dataclass(slots=True)
class _Past:
    """The newest event of one GPU that others may follow from, and that it fell off the bus."""

    code: int = 0
    line: int = 0
    at: float | None = None
    fell_line: int = 0
    fell_at: float | None = None
    fell: str = ""


@dataclass
class KernelLogReader:
    """Reads lines one by one.

    Args:
        catalogue: what an Xid means.
        year: of timestamps that do not say theirs.
    """

    catalogue: Catalogue
    year: int
    num_lines: int = 0
    num_not_understood: int = 0
    not_understood: deque[NotUnderstood] = field(default_factory=lambda: deque(maxlen=KEPT_BAD))
    identities: OrderedDict[str, Identity] = field(default_factory=OrderedDict)
    _held: _Held | None = None
    _falling: _Held | None = None
    _falling_pci: str = ""
    _serial_for: str = ""
    _past: OrderedDict[str, _Past] = field(default_factory=OrderedDict)
    _newest: Observation | None = None

    def read(self, lines: Iterable[str]) -> Iterator[Observation]:
        """All observations of `lines`, as they come."""
        for line in lines:
            yield from self.feed(line)
        yield from self.flush()

    def feed(self, line: str) -> list[Observation]:
        """Take one line; what it completes."""
        self.num_lines += 1
        waiting = self._held is not None or self._falling is not None
        if not waiting and not any(word in line for word in _MENTIONS):
            if "repeated" in line and self._newest is not None:
                return self._repeated(line)
            self._newest = None if line[:1] not in (" ", "\t") else self._newest
            return []
        if len(line) > LINE_LIMIT:
            line = line[:LINE_LIMIT]
        if line.startswith((" SUBSYSTEM=", " DEVICE=")):
            return []  # /dev/kmsg's dictionary of the record before.
        found: list[Observation] = []
        message = split_prefix(line, self.year)
        if self._falling is not None:
            found += self._go_on_falling(message)
        if self._held is not None and self._goes_on(message):
            self._join(message)
            return found
        found += self.flush()
        texts = message.text.split("\n") if "\n" in message.text else [message.text]
        for text in texts:
            found += self._message(message._replace(text=text))
        return found

    def flush(self) -> list[Observation]:
        """Decide on what is held: no more lines come for it."""
        held, self._held = self._held, None
        if held is None:
            return []
        decoded = decode_line(held.text)
        if decoded is None:
            self._bad(held.line, held.text, "names an Xid, but not in a form that is known")
            return []
        return self._event(held, decoded)

    @property
    def is_holding(self) -> bool:
        """Whether the last line may still go on."""
        return self._held is not None

    # lines that belong together --------------------------------------------------------------

    def _goes_on(self, message: Message) -> bool:
        """Whether a line goes on with the held message rather than beginning one of its own."""
        held = self._held
        assert held is not None
        text = message.text.strip()
        if held.joined < JOIN_LINES and held.text.rstrip().lower().endswith("by previous"):
            return not message.prefixed or message.fragment
        if held.joined >= JOIN_LINES or not text or _XID_WORD.search(_without_cause(text)):
            return False
        if message.fragment or not message.prefixed:
            return not text.startswith(("NVRM:", "nvidia-"))
        # Wrapped by the driver before the number: the rest comes with a prefix of its own.
        return decode_line(held.text) is None and "NVRM" not in text

    def _join(self, message: Message) -> None:
        assert self._held is not None
        joiner = "" if message.fragment else " "
        self._held.text = f"{self._held.text.rstrip()}{joiner}{message.text.strip()}"[:LINE_LIMIT]
        self._held.joined += 1

    def _message(self, message: Message) -> list[Observation]:
        """Take a message that begins on this line."""
        text = message.text
        identity, serial = _GPU_AT.search(text), _SERIAL.search(text)
        if identity is not None:
            self._identify(normal_pci(identity[1]), uuid=identity[2])
        if serial is not None:
            self._identify(self._serial_for, serial=serial[1])
        if _XID_WORD.search(text) and ("NVRM" in text or "nvidia-nvswitch" in text):
            held = _Held(self.num_lines, message.at, text)
            if not _SXID_DETAIL.search(text) or not self._is_detail(held):
                self._held = held
            return []
        one_line = _FELL_ONE_LINE.search(text)
        if one_line is not None:
            return self._fell(normal_pci(one_line[1]), self.num_lines, message.at, text)
        opens = _FELL_OPENS.search(text)
        if opens is not None and "NVRM" in text:
            self._falling = _Held(self.num_lines, message.at, text)
            self._falling_pci = normal_pci(opens[1])
            return self._go_on_falling(message._replace(text=""))
        return []

    def _go_on_falling(self, message: Message) -> list[Observation]:
        """Follow a message of several lines that may end in "fallen off the bus"."""
        falling = self._falling
        assert falling is not None
        falling.joined += 1
        if "NVRM" in message.text or not message.prefixed:
            falling.text = f"{falling.text} {message.text.replace('NVRM:', '').strip()}"[
                :LINE_LIMIT
            ]
        if "fallen off the bus" in " ".join(falling.text.split()):
            self._falling = None
            return self._fell(self._falling_pci, falling.line, falling.at, falling.text)
        if falling.joined > 2 * JOIN_LINES:
            self._falling = None
        return []

    def _is_detail(self, held: _Held) -> bool:
        """Severity and data of an SXid come after it, on lines of their own. Where it is not
        there, it was lost, and the first of them stands for it."""
        decoded = decode_line(held.text)
        if decoded is None:
            return False
        past = self._past_of(decoded.pci)
        return past.code == decoded.code and self._is_near(past.line, past.at, held)

    # events ----------------------------------------------------------------------------------

    def _event(self, held: _Held, decoded: Decoded) -> list[Observation]:
        past = self._past_of(decoded.pci)
        if decoded.code == 79 and not decoded.is_switch:
            told = past.fell == "words" and self._is_near(past.fell_line, past.fell_at, held)
            past.fell, past.fell_line, past.fell_at = "number", held.line, held.at
            if told:
                return []
        entry = self.catalogue.entry(decoded.code)
        cause = decoded.cause_of
        if cause is None and decoded.code in _FOLLOWERS and past.code:
            cause = past.code if self._is_near(past.line, past.at, held) else None
        verdict = entry.verdict if entry.fixed else (decoded.verdict or entry.verdict)
        if cause is not None and decoded.code != 154:
            verdict = "healthy"  # Cleaning up after another Xid says nothing more of the GPU.
        if decoded.is_switch or (decoded.code in _CAUSES and cause is None):
            past.code, past.line, past.at = decoded.code, held.line, held.at
        action = decoded.action or ("" if decoded.is_switch else entry.immediate)
        if decoded.code == 45:
            action = "IGNORE" if cause is not None else entry.investigatory
        observation = Observation(
            source="kernel_log",
            gpu=decoded.pci or None,
            pci=decoded.pci,
            code=decoded.code,
            subcode=decoded.subcode,
            cause_of=cause,
            severity=severity_of(verdict),
            verdict=verdict,
            action=action,
            line=held.line,
            at=held.at,
            text=clipped(held.text.strip()),
        )
        self._newest = observation
        return [observation]

    def _fell(self, pci: str, line: int, at: float | None, text: str) -> list[Observation]:
        """A GPU that fell off the bus, in words: the same as Xid 79, unless that told of it."""
        past = self._past_of(pci)
        here = _Held(line, at, text)
        if past.fell and self._is_near(past.fell_line, past.fell_at, here):
            return []
        past.fell, past.fell_line, past.fell_at = "words", line, at
        past.code, past.line, past.at = 79, line, at
        entry = self.catalogue.entry(79)
        return [
            Observation(
                source="kernel_log",
                gpu=pci or None,
                pci=pci,
                code=79,
                subcode="without an Xid number",
                severity=severity_of(entry.verdict),
                verdict=entry.verdict,
                action=entry.immediate,
                line=line,
                at=at,
                text=clipped(" ".join(text.split())),
            )
        ]

    def _repeated(self, line: str) -> list[Observation]:
        """syslog's "message repeated N times" stands for N more of the message before."""
        match = _REPEATED.search(line)
        newest, self._newest = self._newest, None
        if match is None or newest is None:
            return []
        return [msgspec.structs.replace(newest, count=int(match[1]), line=self.num_lines)]

    def _past_of(self, pci: str) -> _Past:
        past = self._past.get(pci)
        if past is None:
            past = self._past[pci] = _Past()
            if len(self._past) > KEPT_GPUS:
                self._past.popitem(last=False)
        else:
            self._past.move_to_end(pci)
        return past

    def _is_near(self, line: int, at: float | None, held: _Held) -> bool:
        if at is not None and held.at is not None:
            return abs(held.at - at) <= FOLLOW_S
        return abs(held.line - line) <= FOLLOW_LINES

    def _identify(self, pci: str, *, uuid: str = "", serial: str = "") -> None:
        if not pci:
            return
        known = self.identities.get(pci)
        if uuid:
            self._serial_for = pci
            serial = known.serial if known is not None and known.uuid == uuid else ""
        elif known is not None:
            uuid = known.uuid
        self.identities[pci] = Identity(pci=pci, uuid=uuid, serial=serial)
        self.identities.move_to_end(pci)
        if len(self.identities) > KEPT_GPUS:
            self.identities.popitem(last=False)

    def _bad(self, line: int, text: str, reason: str) -> None:
        self.num_not_understood += 1
        self.not_understood.append(NotUnderstood(line=line, text=clipped(text), reason=reason))


def _without_cause(text: str) -> str:
    return text if cause_in(text) is None else text.lower().replace("previous xid", "")
