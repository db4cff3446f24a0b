"""The policy: who answers, by when, and that the run never waits."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import get_args
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import PolicyConfig
from runtime.errors import ConfigError
from runtime.plan.policy import answer_for, barred, changed, in_force, rule, state_of
from runtime.plan.policy_config import Approvals, Deciders, QuietHours
from storage.policy_state import ANSWERS, MODES, Answer, Mode
from storage.records import ActionKind

KINDS = get_args(ActionKind)
NIGHT = QuietHours(begin="22:00", end="06:00", zone="Europe/Berlin")


def at(text: str, zone: str = "Europe/Berlin") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


MIDNIGHT, NOON = at("2026-12-02T00:00"), at("2026-12-02T12:00")


@pytest.mark.parametrize(
    ("answer", "reaction", "auto_at"),
    [
        ("auto", "act", 100.0),
        ("approve", "wait", None),
        ("auto_after_deadline", "act_at_deadline", 220.0),
        ("recommend", "advise", None),
        ("observe", "observe", None),
    ],
)
def test_answers(answer: Answer, reaction: str, auto_at: float | None) -> None:
    ruling = rule(PolicyConfig(shrink=answer), "shrink_boost", created_at=100.0, others_train=True)
    assert (ruling.reaction, ruling.auto_at, ruling.expires_at) == (reaction, auto_at, 1000.0)


def test_each_kind_has_its_key() -> None:
    policy = PolicyConfig(shrink="auto", grow="auto_after_deadline", drop="approve")
    assert {kind: answer_for(policy, kind, NOON) for kind in KINDS} == {
        "carry_on": "approve",
        "drop": "approve",
        "shrink": "auto",
        "shrink_boost": "auto",
        "grow": "auto_after_deadline",
        "replace": "approve",
        "restart": "approve",
    }


@pytest.mark.parametrize(
    ("mode", "shrink", "drop"),
    [
        ("observe", "observe", "observe"),
        ("recommend", "recommend", "recommend"),
        ("act_with_approval", "approve", "approve"),
        # Dropping and restarting give something up: the mode alone does not do it.
        ("act", "auto", "approve"),
    ],
)
def test_modes_answer_for_the_kinds_without_an_answer(mode: Mode, shrink: str, drop: str) -> None:
    policy = PolicyConfig(mode=mode)
    assert answer_for(policy, "shrink_boost", NOON) == shrink
    assert answer_for(policy, "drop", NOON) == drop


@pytest.mark.parametrize("mode", ["observe", "recommend"])
def test_observe_and_recommend_brake_every_kind_at_every_hour(mode: Mode) -> None:
    policy = PolicyConfig(mode=mode, shrink="auto", quiet_hours=(NIGHT,))
    for now in (NOON, MIDNIGHT):
        assert {answer_for(policy, kind, now) for kind in KINDS} == {mode}
        assert "nobody can" in barred(policy, "shrink", now) or mode == "observe"
        assert mode in barred(policy, "shrink", now)


def test_in_quiet_hours_only_the_kinds_they_name_act_alone() -> None:
    policy = PolicyConfig(shrink="approve", quiet_hours=(NIGHT,))
    assert answer_for(policy, "shrink", NOON) == "approve"
    assert answer_for(policy, "shrink", MIDNIGHT) == "auto"
    assert answer_for(policy, "drop", MIDNIGHT) == "approve"
    ruling = rule(policy, "shrink", created_at=MIDNIGHT, others_train=True)
    assert ruling.auto_at == MIDNIGHT
    assert "quiet hours 22:00 to 06:00 Europe/Berlin, until 05:00 UTC" in ruling.reason


def test_quiet_hours_can_freeze_changes_too() -> None:
    demo = QuietHours(
        begin="09:00", end="17:00", days=("wed",), zone="UTC", mode="act_with_approval"
    )
    policy = PolicyConfig(mode="act", grow="auto", quiet_hours=(demo,))
    assert answer_for(policy, "grow", NOON) == "approve"
    assert answer_for(policy, "grow", NOON + 86_400) == "auto"


def test_of_two_quiet_hours_the_more_careful_counts() -> None:
    frozen = QuietHours(begin="23:00", end="01:00", zone="Europe/Berlin", mode="recommend")
    policy = PolicyConfig(quiet_hours=(NIGHT, frozen))
    assert in_force(policy, MIDNIGHT).mode == "recommend"
    assert in_force(policy, MIDNIGHT + 2 * 3600).mode == "act"


def test_what_two_must_approve_is_never_carried_out_unasked() -> None:
    policy = PolicyConfig(mode="act", approvals=Approvals(shrink=2), quiet_hours=(NIGHT,))
    for now in (NOON, MIDNIGHT):
        ruling = rule(policy, "shrink", created_at=now, others_train=True)
        assert (ruling.auto_at, ruling.num_approvals) == (None, 2)
        assert "needs 2 approvals by different people" in ruling.reason


def test_who_may_decide() -> None:
    policy = PolicyConfig(deciders=Deciders(drop="admin"))
    assert rule(policy, "drop", created_at=0.0, others_train=True).decider == "admin"
    assert rule(policy, "shrink", created_at=0.0, others_train=True).decider == "approver"


@pytest.mark.parametrize(
    ("now", "ends"),
    [
        ("2026-12-01T21:59:59", None),
        ("2026-12-01T22:00:00", "2026-12-02T06:00"),
        ("2026-12-02T05:59:59", "2026-12-02T06:00"),
        ("2026-12-02T06:00:00", None),
        # The clocks go forward in this night, and back in the other.
        ("2026-03-29T03:30:00", "2026-03-29T06:00"),
        ("2026-10-25T02:30:00", "2026-10-25T06:00"),
    ],
)
def test_quiet_hours_pass_midnight_and_the_change_of_the_clocks(now: str, ends: str | None) -> None:
    assert NIGHT.ends_at(at(now)) == (at(ends) if ends else None)


def test_quiet_days_are_those_they_begin_on() -> None:
    weekend = QuietHours(begin="22:00", end="06:00", days=("fri",), zone="UTC")
    friday = datetime(2026, 12, 4, 23, tzinfo=UTC).timestamp()
    assert weekend.ends_at(friday) is not None
    assert weekend.ends_at(friday + 3 * 3600) is not None
    assert weekend.ends_at(friday + 86_400) is None
    whole = QuietHours(begin="00:00", end="00:00", days=("sat",), zone="UTC")
    assert whole.ends_at(friday) is None
    assert whole.ends_at(friday + 3600) == friday + 25 * 3600


@given(
    kind=st.sampled_from([kind for kind in KINDS if kind != "carry_on"]),
    answers=st.tuples(*[st.sampled_from(ANSWERS)] * 3),
    mode=st.sampled_from(MODES),
    created_at=st.floats(min_value=0, max_value=2e9),
)
def test_the_run_never_waits(
    kind: ActionKind, answers: tuple[Answer, Answer, Answer], mode: Mode, created_at: float
) -> None:
    policy = PolicyConfig(mode=mode, shrink=answers[0], grow=answers[1], drop=answers[2])
    ruling = rule(policy, kind, created_at=created_at, others_train=False)
    assert ruling.reaction == "act"
    assert ruling.auto_at == created_at


def test_a_deadline_never_lies_after_the_expiry() -> None:
    policy = PolicyConfig(grow="auto_after_deadline", expires_s=10.0, deadline_s=60.0)
    ruling = rule(policy, "grow", created_at=0.0, others_train=True)
    assert ruling.auto_at == ruling.expires_at == 10.0


def test_a_deadline_counts_from_the_policy_that_set_it() -> None:
    policy = PolicyConfig(grow="auto_after_deadline", deadline_s=60.0)
    ruling = rule(policy, "grow", created_at=0.0, others_train=True, now=300.0)
    assert (ruling.auto_at, ruling.expires_at) == (360.0, 900.0)


def test_what_a_person_asked_for_is_not_carried_out_unasked() -> None:
    policy = PolicyConfig(mode="act")
    ruling = rule(policy, "shrink", created_at=0.0, others_train=True, by_hand=True)
    assert (ruling.reaction, ruling.auto_at) == ("wait", None)


# changes at run time -----------------------------------------------------------------------------


def test_changes_are_read_as_toml() -> None:
    policy = changed(
        PolicyConfig(),
        {
            "mode": "act",
            "drop": '"recommend"',
            "deadline_s": "30",
            "approvals.restart": "2",
            "deciders.restart": "admin",
            "quiet_hours": '[{begin = "22:00", end = "06:00", zone = "Europe/Berlin"}]',
        },
    )
    assert policy == PolicyConfig(
        mode="act",
        drop="recommend",
        deadline_s=30.0,
        approvals=Approvals(restart=2),
        deciders=Deciders(restart="admin"),
        quiet_hours=(NIGHT,),
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "acts"}, "`mode` is 'acts'; allowed: 'act' or 'act_with_approval' or 'observe'"),
        ({"shrnk": "auto"}, "did you mean `shrink`?"),
        ({"mode.x": "auto"}, "`mode` is no table"),
        ({"approvals.drop": "9"}, "`approvals.drop` is 9; allowed: 1 to 5"),
        ({"approvals.pause": "2"}, "allowed in `approvals`: shrink, grow, drop, replace, restart"),
        ({"shrink": "auto", "approvals.shrink": "2"}, "which asks nobody; allowed: 1, or shrink"),
        ({"quiet_hours": "[{"}, "which is no TOML"),
        (
            {"quiet_hours": '[{begin="7", end="8:00"}]'},
            "`quiet_hours[0].begin` is '7'; allowed: \"",
        ),
        (
            {"quiet_hours": '[{begin="07:00", end="08:00", zone="Mars"}]'},
            "`quiet_hours[0].zone` is 'Mars'; allowed: a time zone such as",
        ),
        ({"expires_s": "0"}, "`expires_s` is 0.0; allowed: more than 0"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused_with_the_fix(
    changes: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        changed(PolicyConfig(), changes)
    assert words in str(refused.value)


def test_the_header_says_the_mode_and_what_differs_from_it() -> None:
    assert state_of(PolicyConfig(), NOON).words == "act with approval"
    assert state_of(PolicyConfig(mode="act"), NOON).words == "act; drop, restart: needs approval"
    policy = PolicyConfig(grow="auto", quiet_hours=(NIGHT,))
    assert state_of(policy, NOON).words == "act with approval; grow: automatic"
    night = state_of(policy, MIDNIGHT)
    assert night.mode == "act"
    assert night.words.endswith("(quiet hours 22:00 to 06:00 Europe/Berlin, until 05:00 UTC)")
    assert state_of(PolicyConfig(mode="observe", grow="auto"), NOON).words == "observe"
