"""Signed identity: what is forged, altered, meant for another run, old or above one's role."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from storage.commands import Command, Decide, SetBudget, Stop, Trigger
from storage.identity import MAX_AGE_S, ROLES, Role, Writer, refusal, sign, writer_key
from storage.records import decode_packed, encode_packed
from storage.settings import SettingsError

KEYS: dict[Writer, bytes] = {"app": b"a" * 32, "cli": b"c" * 32}
NOW = 1000.0


def _decide(via: str = "browser") -> Decide:
    return Decide(
        id="c1",
        at=NOW,
        who="ada",
        via=via,
        proposal="p1",
        generation=1,
        revision=1,
        verdict="approved",
    )


def _judged(command: Command, run: str = "r", now: float = NOW) -> str:
    return refusal(decode_packed(encode_packed(command), Command), run, KEYS, now)


def test_a_signed_command_is_accepted_after_its_way_through_the_store() -> None:
    assert _judged(sign(_decide(), "r", "approver", KEYS["app"])) == ""
    budget = SetBudget(id="b", at=NOW, who="ada", via="cli", rack="r0", budget_w=5)
    assert _judged(sign(budget, "r", "admin", KEYS["cli"])) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"who": "bob"},
        {"role": "admin"},
        {"verdict": "rejected"},
        {"id": "c2"},
        {"at": NOW + 1},
        {"via": "cli"},
        {"reason": "other"},
        {"signature": "é"},
    ],
)
def test_whatever_is_altered_is_refused(change: dict[str, object]) -> None:
    signed = sign(_decide(), "r", "approver", KEYS["app"])
    assert "signature does not match" in _judged(msgspec.structs.replace(signed, **change))


def test_unsigned_foreign_and_old_commands_are_refused() -> None:
    signed = sign(_decide(), "r", "approver", KEYS["app"])
    assert "not signed" in _judged(_decide())
    assert "another run" in _judged(signed, run="other")
    assert "Send again" in _judged(signed, now=NOW + MAX_AGE_S + 1)
    assert "no writer" in _judged(sign(_decide("policy"), "r", "admin", KEYS["app"]))
    assert "does not match" in _judged(sign(_decide(), "r", "admin", KEYS["cli"]))


@pytest.mark.parametrize(
    ("command", "least"),
    [
        (Trigger(id="t", at=NOW, who="a", via="cli", replica=0, kind="drop"), "operator"),
        (_decide("cli"), "approver"),
        (Stop(id="s", at=NOW, who="a", via="cli"), "admin"),
    ],
)
def test_each_action_takes_its_role(command: Command, least: Role) -> None:
    for role in ROLES:
        why = _judged(sign(command, "r", role, KEYS["cli"]))
        assert (why == "") == (ROLES.index(role) >= ROLES.index(least)), (role, why)


def test_keys_are_made_once_for_their_owner_only(tmp_path: Path) -> None:
    key = writer_key(tmp_path, "app", {})
    assert len(key) >= 32
    assert writer_key(tmp_path, "app", {}) == key
    assert writer_key(tmp_path, "cli", {}) != key
    path = tmp_path / "keys" / "app.key"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        writer_key(tmp_path, "app", {})


def test_a_key_of_the_environment_goes_first(tmp_path: Path) -> None:
    assert writer_key(tmp_path, "cli", {"COUNTERPOISE_CLI_KEY": "k" * 16}) == b"k" * 16
    assert not (tmp_path / "keys").exists()
    with pytest.raises(SettingsError, match="too short"):
        writer_key(tmp_path, "cli", {"COUNTERPOISE_CLI_KEY": "short"})
