"""The policy: who answers, by when, and that the run never waits."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import Answer, PolicyConfig
from runtime.plan.policy import answer_for, rule
from storage.records import ActionKind

KINDS = get_args(ActionKind)


@pytest.mark.parametrize(
    ("answer", "reaction", "auto_at"),
    [
        ("auto", "act", 100.0),
        ("approve", "wait", None),
        ("auto_after_deadline", "act_at_deadline", 220.0),
    ],
)
def test_answers(answer: Answer, reaction: str, auto_at: float | None) -> None:
    ruling = rule(PolicyConfig(shrink=answer), "shrink_boost", created_at=100.0, others_train=True)
    assert (ruling.reaction, ruling.auto_at, ruling.expires_at) == (reaction, auto_at, 1000.0)


def test_each_kind_has_its_key() -> None:
    policy = PolicyConfig(shrink="auto", grow="auto_after_deadline", drop="approve")
    assert {kind: answer_for(policy, kind) for kind in KINDS} == {
        "carry_on": "approve",
        "drop": "approve",
        "shrink": "auto",
        "shrink_boost": "auto",
        "grow": "auto_after_deadline",
        "replace": "approve",
        "restart": "approve",
    }


@given(
    kind=st.sampled_from([kind for kind in KINDS if kind != "carry_on"]),
    answers=st.tuples(*[st.sampled_from(get_args(Answer))] * 3),
    created_at=st.floats(min_value=0, max_value=2e9),
)
def test_the_run_never_waits(
    kind: ActionKind, answers: tuple[Answer, Answer, Answer], created_at: float
) -> None:
    policy = PolicyConfig(shrink=answers[0], grow=answers[1], drop=answers[2])
    ruling = rule(policy, kind, created_at=created_at, others_train=False)
    assert ruling.reaction == "act"
    assert ruling.auto_at == created_at


def test_a_deadline_never_lies_after_the_expiry() -> None:
    policy = PolicyConfig(grow="auto_after_deadline", expires_s=10.0, deadline_s=60.0)
    ruling = rule(policy, "grow", created_at=0.0, others_train=True)
    assert ruling.auto_at == ruling.expires_at == 10.0
