"""What stands before a kernel message: timestamps, host, facility, in the forms of the field.

Understands `[ 123.456]`, `[Sun Feb 23 16:24:18 2025]`, ISO 8601, RFC 3164, RFC 5424 and `<pri>`
prefixes, /dev/kmsg records and journald's JSON. Times without a zone are taken as UTC: only their
differences matter. Pure.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

_MONTHS = {
    name: number
    for number, name in enumerate(
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), 1
    )
}
# `dmesg -x` and machines that log over the network: `kern  :err   : `, `10.0.0.7: kern: err: `.
_FACILITY = re.compile(
    r"(?:[\w.:-]{1,64}: )?(?:kern|user|daemon|syslog|auth|local\d)\s*:\s*"
    r"(?:emerg|alert|crit|err|error|warn|warning|notice|info|debug)\s*:\s*"
)
_PRI = re.compile(r"<\d{1,3}>(?:\d{1,2} )?")
_KMSG = re.compile(r"(\d{1,6}),(\d+),(\d+),([-c+])[^;]{0,64};")
_RELATIVE = re.compile(r"\[\s*(\d{1,12}(?:\.\d{1,9})?)\]:?\s?")
# The task or processor that printed, with CONFIG_PRINTK_CALLER: `[ T1946]`, `[  C12]`.
_CALLER = re.compile(r"\[\s*[TC]\d{1,10}\]:?\s?")
_CTIME = re.compile(
    r"\[(?:[A-Z][a-z]{2} )?([A-Z][a-z]{2})\s+(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:\.\d+)? (\d{4})\]"
    r":?\s?"
)
_ISO = re.compile(
    r"\[?(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\s?"
    r"(Z|[+-]\d\d:?\d\d)?\]?:?\s+"
)
_RFC3164 = re.compile(r"([A-Z][a-z]{2})\s+(\d{1,2}) (?:(\d{4}) )?(\d\d):(\d\d):(\d\d)(?:\.\d+)?\s+")
# `host kernel:`, `host kernel - - -`, `kernel:`, `host nvidia-smi[12]:`, `kern: warning:`
_TAG = re.compile(
    r"(?:(?P<host>[\w.:-]{1,255})\s+)?"
    r"(?P<tag>kernel|[\w./@-]{1,64}\[\d+\])(?::\s?|(?:\s+-){1,3}\s+)"
)


class Message(NamedTuple):
    """A line without its prefix. at: seconds (since the epoch, or since boot for relative times).
    prefixed: it had a prefix, so it begins a message. fragment: /dev/kmsg says it goes on one."""

    text: str
    at: float | None
    prefixed: bool
    fragment: bool = False


def split_prefix(line: str, year: int) -> Message:
    """Take the prefix off a line. year: for RFC 3164, which does not say it."""
    line = line.rstrip("\r\n")
    if line.startswith("{"):
        return _journald_json(line)
    kmsg = _KMSG.match(line)
    if kmsg is not None:
        text = _unescaped(line[kmsg.end() :])
        return Message(text, int(kmsg[3]) / 1e6, True, kmsg[4] in "c+")
    rest, at, prefixed = line, None, False
    pri = _PRI.match(rest) or _FACILITY.match(rest)
    if pri is not None:
        rest, prefixed = rest[pri.end() :], True
    for _ in range(2):  # `Feb 23 ... kernel: [ 123.456] NVRM: ...` has two.
        stamp = _timestamp(rest, year)
        if stamp is not None:
            at = stamp[0] if at is None else at
            rest, prefixed = stamp[1], True
        caller = _CALLER.match(rest)
        if caller is not None and prefixed:
            rest = rest[caller.end() :]
        tag = _TAG.match(rest)
        if tag is not None:
            rest, prefixed = rest[tag.end() :], True
    return Message(rest, at, prefixed)


def _timestamp(text: str, year: int) -> tuple[float | None, str] | None:
    for pattern, read in (
        (_RELATIVE, _read_relative),
        (_CTIME, _read_ctime),
        (_ISO, _read_iso),
        (_RFC3164, _read_rfc3164),
    ):
        match = pattern.match(text)
        if match is not None:
            try:
                return read(match, year), text[match.end() :]
            except (ValueError, OverflowError, KeyError):
                return None
    return None


def _read_relative(match: re.Match[str], _year: int) -> float:
    return float(match[1])


def _read_ctime(match: re.Match[str], _year: int) -> float:
    month, day, hour, minute, second, year = match.groups()
    return _epoch(int(year), _MONTHS[month.lower()], int(day), int(hour), int(minute), int(second))


def _read_iso(match: re.Match[str], _year: int) -> float:
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    at = _epoch(int(year), int(month), int(day), int(hour), int(minute), int(second))
    if zone and zone != "Z":
        minutes = int(zone[1:3]) * 60 + int(zone[-2:])
        at -= 60 * minutes if zone[0] == "+" else -60 * minutes
    return at + (float(f"0.{fraction}") if fraction else 0.0)


def _read_rfc3164(match: re.Match[str], year: int) -> float:
    month, day, written, hour, minute, second = match.groups()
    return _epoch(
        int(written or year), _MONTHS[month.lower()], int(day), int(hour), int(minute), int(second)
    )


def _epoch(year: int, month: int, day: int, hour: int, minute: int, second: int) -> float:
    return datetime(year, month, day, hour, minute, min(second, 59), tzinfo=UTC).timestamp()


def _journald_json(line: str) -> Message:
    """`journalctl -o json`: MESSAGE is text, or a list of bytes where it is not valid UTF-8."""
    try:
        entry = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Message(line, None, False)
    if not isinstance(entry, dict):
        return Message(line, None, False)
    message, stamp = entry.get("MESSAGE"), entry.get("__REALTIME_TIMESTAMP")
    if isinstance(message, list) and all(isinstance(b, int) and 0 <= b < 256 for b in message):
        message = bytes(message).decode("utf-8", "replace")
    if not isinstance(message, str):
        return Message(line, None, False)
    at = None
    if isinstance(stamp, str) and stamp.isascii() and stamp.isdigit() and len(stamp) < 20:
        at = int(stamp) / 1e6
    return Message(message, at, True)


def _unescaped(text: str) -> str:
    """/dev/kmsg writes control characters as \\xNN."""
    if "\\x" not in text:
        return text
    return re.sub(r"\\x([0-9a-fA-F]{2})", lambda m: chr(int(m[1], 16)), text)
