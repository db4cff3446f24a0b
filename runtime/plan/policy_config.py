"""`[policy]`: what may be carried out unasked, who decides the rest, and when. Pure.

Whatever it says, a broken replica is left out at once, and when no replica is whole, what has live
slots trains on: the run never waits for a person.
"""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta
from typing import Literal
from zoneinfo import ZoneInfo

import msgspec

from runtime.config_errors import require
from storage.policy_state import POLICY_KINDS, Answer, Decider, Mode, PolicyKind

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")
MAX_APPROVALS = 5


class QuietHours(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hours in which another mode holds, because nobody is awake or nothing shall change.

    From begin to end ("22:00", "06:00"; past midnight when end is not later) in `zone`, on the days
    it begins on. mode "act": `kinds` are carried out unasked, the rest is as by day; the other
    modes hold for every kind.
    """

    begin: str
    end: str
    days: tuple[Day, ...] = DAYS
    zone: str = "UTC"
    mode: Mode = "act"
    kinds: tuple[PolicyKind, ...] = ("shrink", "grow", "replace")

    def __post_init__(self) -> None:
        for key in ("begin", "end"):
            value = getattr(self, key)
            require(bool(_CLOCK.fullmatch(value)), key, value, '"00:00" to "23:59"')
        require(bool(self.days), "days", list(self.days), "at least one day")
        try:
            ZoneInfo(self.zone)
        except (KeyError, OSError, ValueError) as error:
            raise ValueError(
                f'`zone` is {self.zone!r}; allowed: a time zone such as "Europe/Berlin" or "UTC"'
            ) from error

    def ends_at(self, now: float) -> float | None:
        """When the window that holds at `now` (epoch seconds) ends; None when none does."""
        zone = ZoneInfo(self.zone)
        local = datetime.fromtimestamp(now, zone)
        for back in (0, 1):
            day = (local - timedelta(days=back)).date()
            if DAYS[day.weekday()] not in self.days:
                continue
            begin = datetime.combine(day, _clock(self.begin), zone)
            end = datetime.combine(day, _clock(self.end), zone)
            if end <= begin:
                end = datetime.combine(day + timedelta(days=1), _clock(self.end), zone)
            if begin.timestamp() <= now < end.timestamp():
                return end.timestamp()
        return None

    @property
    def words(self) -> str:
        days = "" if len(self.days) == len(DAYS) else f"{', '.join(self.days)} "
        return f"quiet hours {days}{self.begin} to {self.end} {self.zone}"


def _clock(text: str) -> time:
    return datetime.strptime(text, "%H:%M").time()


class Approvals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many different people must approve, by kind of action."""

    shrink: int = 1
    grow: int = 1
    drop: int = 1
    replace: int = 1
    restart: int = 1

    def __post_init__(self) -> None:
        for kind in POLICY_KINDS:
            count = getattr(self, kind)
            require(1 <= count <= MAX_APPROVALS, kind, count, f"1 to {MAX_APPROVALS}")


class Deciders(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The least role that may decide, by kind of action."""

    shrink: Decider = "approver"
    grow: Decider = "approver"
    drop: Decider = "approver"
    replace: Decider = "approver"
    restart: Decider = "approver"


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who decides what, and how long a proposal stands.

    mode: for every kind of action without an answer of its own ("by_mode"); "observe" and
        "recommend" hold for all kinds, at all hours.
    expires_s: how long a proposal may be answered. deadline_s: for "auto_after_deadline".
    evidence_max_age_s: on older evidence nothing is approved; the runtime looks again first.
    """

    mode: Mode = "act_with_approval"
    shrink: Answer = "by_mode"
    grow: Answer = "by_mode"
    drop: Answer = "by_mode"
    replace: Answer = "by_mode"
    restart: Answer = "by_mode"
    approvals: Approvals = Approvals()
    deciders: Deciders = Deciders()
    expires_s: float = 900.0
    deadline_s: float = 120.0
    evidence_max_age_s: float = 600.0
    quiet_hours: tuple[QuietHours, ...] = ()

    def __post_init__(self) -> None:
        for key in ("expires_s", "deadline_s", "evidence_max_age_s"):
            require(getattr(self, key) > 0, key, getattr(self, key), "more than 0")
        for kind in POLICY_KINDS:
            count, own = self.num_approvals(kind), getattr(self, kind)
            if count > 1 and own in ("auto", "auto_after_deadline"):
                raise ValueError(
                    f"`approvals.{kind}` is {count}, but `{kind}` is {own!r}, which asks nobody; "
                    f'allowed: 1, or {kind} = "approve"'
                )

    def num_approvals(self, kind: PolicyKind) -> int:
        return int(getattr(self.approvals, kind))

    def decider(self, kind: PolicyKind) -> Decider:
        found: Decider = getattr(self.deciders, kind)
        return found
