"""Who signs in with which role, and what a wrong set-up is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from runtime.cli import cli
from storage import sign_in
from storage.settings import SettingsError
from storage.sign_in import SECRET_HEADER, NotSignedInError, Person, SignIn

NOW = 1_000_000.0
SECRET = "s3cret-of-the-proxy-0123"
GROUPS = "viewer=*; operator=sre, oncall; approver=leads; admin=platform"
OIDC = """\
[auth]
redirect_uri = "http://127.0.0.1:8501/oauth2callback"
cookie_secret = "0123456789abcdef0123456789abcdef"
client_id = "counterpoise"
client_secret = "hush-hush"
server_metadata_url = "https://id.example.org/.well-known/openid-configuration"
"""


def _secrets(tmp_path: Path, text: str = OIDC) -> str:
    path = tmp_path / "secrets.toml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def _claims(**more: Any) -> dict[str, Any]:
    return {"email": "ana@example.org", "iat": NOW - 60, "groups": ["leads", "sre"]} | more


def _headers(**more: list[str]) -> Mapping[str, list[str]]:
    return {
        SECRET_HEADER: [SECRET],
        "X-Forwarded-User": ["ana"],
        "X-Forwarded-Groups": ["oncall, staff"],
    } | more


def test_local_is_the_default_and_for_this_machine_only() -> None:
    local = SignIn.from_env({})
    assert local.mode == "local"
    for address in ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8"):
        local.check_address(address)
    for elsewhere in ("0.0.0.0", "10.0.0.7", "::", None, "dashboard.example.org"):
        with pytest.raises(SettingsError, match=r"127\.0\.0\.1 only"):
            local.check_address(elsewhere)
    SignIn.from_env({sign_in.PUBLISHED_ON: "127.0.0.1"}).check_address("0.0.0.0")
    SignIn.from_env({"COUNTERPOISE_AUTH": "proxy", sign_in.PROXY_SECRET: SECRET}).check_address(
        "0.0.0.0"
    )


def test_local_mode_answers_for_no_foreign_name() -> None:
    local = SignIn.from_env({})
    for host in ("127.0.0.1:8501", "localhost", "[::1]:8501", None):
        local.check_host(host)
    for host in ("evil.example:8501", "127.0.0.1.evil.example", "10.0.0.7:8501", ""):
        with pytest.raises(NotSignedInError, match="local mode"):
            local.check_host(host)


@pytest.mark.parametrize(
    ("groups", "role"),
    [
        ("platform", "admin"),
        (["sre", "leads"], "approver"),
        (["oncall"], "operator"),
        ([], "viewer"),
        (None, "viewer"),
        ({"admin": True}, "viewer"),
    ],
)
def test_the_highest_role_of_a_claim_counts(tmp_path: Path, groups: object, role: str) -> None:
    people = SignIn.from_env(
        {
            "COUNTERPOISE_AUTH": "oidc",
            sign_in.SECRETS: _secrets(tmp_path),
            sign_in.ROLES_OF: GROUPS,
        }
    )
    assert people.by_claims(_claims(groups=groups), NOW).role == role


def test_without_a_mapping_a_group_has_the_role_of_its_name() -> None:
    people = SignIn(groups=sign_in._groups(""), claim="realm_access.roles")
    claims = _claims(realm_access={"roles": ["operator"]})
    assert people.by_claims(claims, NOW) == Person(who="ana@example.org", role="operator")
    with pytest.raises(NotSignedInError, match="have no role here"):
        people.by_claims(_claims(groups=["admin"]), NOW)


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"iat": NOW - 13 * 3600}, "older than 12 h"),
        ({"iat": None}, "older than"),
        ({"iat": math.nan}, "older than"),
        ({"email": ""}, "did not say who"),
        ({"email": ["ana"]}, "did not say who"),
        ({"email_verified": False}, "not verified"),
        ({"email": "ana\n\x1b[0m"}, "printable"),
    ],
)
def test_old_nameless_and_unverified_sign_ins_are_refused(
    claims: dict[str, Any], words: str
) -> None:
    people = SignIn(groups=sign_in._groups(GROUPS))
    with pytest.raises(NotSignedInError, match=words):
        people.by_claims(_claims(**claims), NOW)


def test_headers_count_from_the_proxy_alone() -> None:
    people = SignIn(mode="proxy", groups=sign_in._groups(GROUPS), proxy_secret=SECRET.encode())
    assert people.by_headers(lambda name: _headers()[name]) == Person(who="ana", role="operator")
    for wrong in ([], ["guess"], [SECRET + "x"], [SECRET, SECRET], ["é"]):
        with pytest.raises(NotSignedInError, match="sign-in proxy only") as caught:
            people.by_headers(lambda name, wrong=wrong: _headers(**{SECRET_HEADER: wrong})[name])  # type: ignore[misc]
        assert SECRET not in str(caught.value)
    for name, values in {
        "X-Forwarded-User": ["ana", "bob"],
        "X-Forwarded-Groups": ["a", "b"],
    }.items():
        with pytest.raises(NotSignedInError, match="exactly once"):
            people.by_headers(lambda one, n=name, v=values: _headers(**{n: v})[one])  # type: ignore[misc]
    with pytest.raises(NotSignedInError, match="exactly once"):
        people.by_headers(lambda name: _headers(**{"X-Forwarded-User": []})[name])


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"COUNTERPOISE_AUTH": "ldap"}, "allowed: local, oidc, proxy"),
        ({"COUNTERPOISE_AUTH_ROLE": "x"}, "COUNTERPOISE_AUTH_ROLE: not known"),
        ({"COUNTERPOISE_AUTH": "proxy"}, "16 bytes or more"),
        ({"COUNTERPOISE_AUTH": "proxy", sign_in.PROXY_SECRET: "short"}, "16 bytes or more"),
        ({sign_in.ROLES_OF: "boss=me"}, "viewer, operator, approver, admin"),
        ({sign_in.ROLES_OF: "admin="}, "'admin='"),
        ({sign_in.ROLES_OF: "admin=a; admin=b"}, "at most once"),
        ({sign_in.HOURS: "never"}, "more than 0"),
        ({"COUNTERPOISE_AUTH": "oidc"}, "COUNTERPOISE_AUTH_SECRETS is not set"),
        ({"COUNTERPOISE_AUTH": "oidc", sign_in.SECRETS: "/nowhere/x.toml"}, "cannot be read"),
    ],
)
def test_a_wrong_set_up_is_named(env: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        SignIn.from_env(env)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[auth]", "[oidc]", "no text 'redirect_uri'"),
        ("0123456789abcdef0123456789abcdef", "short", "too short"),
        ("client_id", "client", "no text 'client_id'"),
        ("https://id", "http://id", "allowed: https"),
        ("/oauth2callback", "/callback", "followed by /oauth2callback"),
        ("[auth]", "[auth", "cannot be read"),
    ],
)
def test_a_wrong_secrets_file_is_named_without_its_secrets(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    env = {"COUNTERPOISE_AUTH": "oidc"}
    assert SignIn.from_env(env | {sign_in.SECRETS: _secrets(tmp_path)}).secrets_file
    with pytest.raises(SettingsError, match=words) as caught:
        SignIn.from_env(env | {sign_in.SECRETS: _secrets(tmp_path, OIDC.replace(old, new, 1))})
    assert "hush-hush" not in str(caught.value)


def test_a_secrets_file_open_to_others_is_refused(tmp_path: Path) -> None:
    path = Path(_secrets(tmp_path))
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod o="):
        SignIn.from_env({"COUNTERPOISE_AUTH": "oidc", sign_in.SECRETS: str(path)})


@pytest.mark.parametrize("command", ["app", "up"])
def test_nothing_starts_that_would_let_in_everybody(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("STREAMLIT_SERVER_ADDRESS", "0.0.0.0")
    result = CliRunner().invoke(cli, [command])
    assert isinstance(result.exception, SettingsError)
    assert "for 127.0.0.1 only" in str(result.exception)
