"""How people sign in to the dashboard and which role that gives them: decided from the environment.

`local`: whoever reaches 127.0.0.1 is admin. `oidc`: an OpenID Connect provider says who it is.
`proxy`: a proxy that signs people in says so in headers, and proves itself by a shared secret.
Pure: the app hands in claims or headers.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from storage.identity import ROLES, Role
from storage.settings import SettingsError

Mode = Literal["local", "oidc", "proxy"]
MODE = "COUNTERPOISE_AUTH"
ROLES_OF = "COUNTERPOISE_AUTH_ROLES"
CLAIM = "COUNTERPOISE_AUTH_CLAIM"
NAME_CLAIM = "COUNTERPOISE_AUTH_NAME_CLAIM"
HOURS = "COUNTERPOISE_AUTH_HOURS"
SECRETS = "COUNTERPOISE_AUTH_SECRETS"
USER_HEADER = "COUNTERPOISE_AUTH_USER_HEADER"
ROLES_HEADER = "COUNTERPOISE_AUTH_ROLES_HEADER"
PROXY_SECRET = "COUNTERPOISE_AUTH_PROXY_SECRET"
SIGN_OUT = "COUNTERPOISE_AUTH_SIGN_OUT"
PUBLISHED_ON = "COUNTERPOISE_PUBLISHED_ON"
# Sent by the proxy with every request; never reaches a browser
SECRET_HEADER = "X-Counterpoise-Proxy-Secret"
MIN_SECRET_BYTES = 16
MIN_COOKIE_SECRET_CHARS = 32

_DEFAULTS: dict[str, str] = {
    MODE: "local",
    ROLES_OF: "",
    CLAIM: "groups",
    NAME_CLAIM: "email",
    HOURS: "12",
    SECRETS: "",
    USER_HEADER: "X-Forwarded-User",
    ROLES_HEADER: "X-Forwarded-Groups",
    PROXY_SECRET: "",
    SIGN_OUT: "",
    PUBLISHED_ON: "",
}
_ROLES_EXAMPLE = "viewer=*; operator=sre,oncall; approver=leads; admin=platform"


class NotSignedInError(Exception):
    """Nobody, or nobody with a role, is signed in; says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Person:
    """Who acts, and the highest role that what was said of them gives."""

    who: str
    role: Role


@dataclass(frozen=True, kw_only=True)
class SignIn:
    """The checked configuration.

    groups: role -> the groups that have it ("*": everybody who is signed in). published_on: where
    people reach a server that itself listens inside a container. max_age_s: an OpenID Connect
    sign-in counts that long, so that a role that was taken away ends with it.
    """

    mode: Mode = "local"
    groups: Mapping[Role, frozenset[str]] = field(default_factory=dict)
    claim: str = "groups"
    name_claim: str = "email"
    max_age_s: float = 12 * 3600.0
    secrets_file: Path | None = None
    user_header: str = "X-Forwarded-User"
    roles_header: str = "X-Forwarded-Groups"
    proxy_secret: bytes = field(default=b"", repr=False)
    sign_out: str = ""
    published_on: str = ""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> SignIn:
        """Read and check every COUNTERPOISE_AUTH variable, and the secrets file they name.

        Raises:
            SettingsError: names the variable, its value (never a secret) and what is allowed.
        """
        env = os.environ if env is None else env
        if unknown := sorted(k for k in env if k.startswith(MODE) and k not in _DEFAULTS):
            raise SettingsError(
                f"{', '.join(unknown)}: not known; allowed: {', '.join(sorted(_DEFAULTS))}"
            )
        value = {name: env.get(name, "").strip() or given for name, given in _DEFAULTS.items()}
        mode = value[MODE]
        if mode not in get_args(Mode):
            raise SettingsError(f"{MODE} is {mode!r}; allowed: {', '.join(get_args(Mode))}")
        return cls(
            mode=mode,  # type: ignore[arg-type]
            groups=_groups(value[ROLES_OF]),
            claim=value[CLAIM],
            name_claim=value[NAME_CLAIM],
            max_age_s=_hours(value[HOURS]) * 3600.0,
            secrets_file=_secrets_file(value[SECRETS]) if mode == "oidc" else None,
            user_header=value[USER_HEADER],
            roles_header=value[ROLES_HEADER],
            proxy_secret=_proxy_secret(value[PROXY_SECRET]) if mode == "proxy" else b"",
            sign_out=value[SIGN_OUT],
            published_on=value[PUBLISHED_ON],
        )

    def check_address(self, address: str | None) -> None:
        """Refuse to let everybody in who reaches `address`, where the dashboard listens.

        Raises:
            SettingsError: local mode, and it can be reached from elsewhere.
        """
        seen = self.published_on or address or "0.0.0.0"
        if self.mode == "local" and not is_loopback(seen):
            raise SettingsError(
                f"the dashboard would let in, as admin, everybody who reaches {seen}: {MODE} is "
                f"'local', which is for 127.0.0.1 only. Listen on 127.0.0.1, or set {MODE} to "
                f"'oidc' or 'proxy'. Where a container publishes the port on 127.0.0.1 alone, say "
                f"so: {PUBLISHED_ON}=127.0.0.1"
            )

    def check_host(self, host: str | None) -> None:
        """In local mode take requests for this machine's own name only: another name means that a
        proxy forwards from elsewhere, or that a foreign page had its name point here.

        Raises:
            NotSignedInError: names the host.
        """
        if self.mode != "local" or host is None:
            return
        name = urlsplit(f"//{host}").hostname or ""
        if not is_loopback(name):
            raise NotSignedInError(
                f"This dashboard is in local mode and answers for 127.0.0.1 and localhost only, "
                f"not for {name!r}. To reach it by another name set {MODE} to 'oidc' or 'proxy'."
            )

    def by_claims(self, claims: Mapping[str, Any], now: float) -> Person:
        """Who the claims of an ID token name. now: epoch seconds.

        Raises:
            NotSignedInError: too old, without a name, or without a role.
        """
        issued = claims.get("iat")
        if not isinstance(issued, int | float) or not now - issued <= self.max_age_s:
            raise NotSignedInError(
                f"Your sign-in is older than {self.max_age_s / 3600:g} h. Sign in again."
            )
        who = claims.get(self.name_claim)
        if not isinstance(who, str) or not who.strip():
            raise NotSignedInError(
                f"The provider did not say who you are: there is no claim {self.name_claim!r} "
                f"({NAME_CLAIM})."
            )
        if self.name_claim == "email" and claims.get("email_verified") is False:
            raise NotSignedInError(f"The provider has not verified the address {who}.")
        return self._person(who.strip(), _values(_claim(claims, self.claim)), self.claim)

    def by_headers(self, values_of: Callable[[str], Sequence[str]]) -> Person:
        """Who the proxy's headers name. values_of: all values of a header, whatever its case.

        Raises:
            NotSignedInError: not from the proxy, or without a name or a role.
        """
        secrets = values_of(SECRET_HEADER)
        if len(secrets) != 1 or not hmac.compare_digest(secrets[0].encode(), self.proxy_secret):
            raise NotSignedInError(
                "This dashboard is reached through its sign-in proxy only. (The request did not "
                f"carry the proxy's secret in {SECRET_HEADER}; operators set it as {PROXY_SECRET}.)"
            )
        names, groups = values_of(self.user_header), values_of(self.roles_header)
        # Twice: one of them may be the client's own
        if len(names) != 1 or len(groups) > 1 or not names[0].strip():
            raise NotSignedInError(
                f"The proxy did not say who you are: {self.user_header} must come exactly once, "
                f"{self.roles_header} at most once."
            )
        found = [one.strip() for one in groups[0].split(",")] if groups else []
        return self._person(names[0].strip(), found, self.roles_header)

    def _person(self, who: str, found: Sequence[str], source: str) -> Person:
        if len(who) > 200 or not who.isprintable():
            raise NotSignedInError("The name you are signed in with is not printable text.")
        for role in reversed(ROLES):
            wanted = self.groups.get(role, frozenset())
            if "*" in wanted or wanted & set(found):
                return Person(who=who, role=role)
        raise NotSignedInError(
            f"You are signed in as {who}, but have no role here. Ask for one of the groups that "
            f"{ROLES_OF} names; {source!r} of your sign-in says: {', '.join(found[:20]) or 'none'}."
        )


def is_loopback(name: str) -> bool:
    """Whether an address or host name is this machine's own, seen from itself alone."""
    if name.lower().rstrip(".") == "localhost" or name.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _groups(text: str) -> dict[Role, frozenset[str]]:
    """Without a word about it, a group has the role it is named like."""
    if not text:
        return {role: frozenset({role}) for role in ROLES}
    found: dict[Role, frozenset[str]] = {}
    for part in filter(None, (one.strip() for one in text.split(";"))):
        name, equals, names = part.partition("=")
        groups = frozenset(filter(None, (one.strip() for one in names.split(","))))
        role = next((one for one in ROLES if one == name.strip()), None)
        if role is None or not equals or not groups or role in found:
            raise SettingsError(
                f"{ROLES_OF} has {part!r}; allowed: each of {', '.join(ROLES)} at most once with "
                f"its groups, for example {_ROLES_EXAMPLE!r}"
            )
        found[role] = groups
    return found


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0.0 < hours <= 720.0:
        raise SettingsError(f"{HOURS} is {text!r}; allowed: more than 0, up to 720")
    return hours


def _proxy_secret(text: str) -> bytes:
    if len(text.encode()) < MIN_SECRET_BYTES:
        raise SettingsError(
            f"{PROXY_SECRET} is not set or too short; set it to {MIN_SECRET_BYTES} bytes or more "
            f"and let the proxy send it as {SECRET_HEADER}"
        )
    return text.encode()


def _secrets_file(text: str) -> Path:
    """The file that Streamlit's sign-in reads: what is missing in it is said before it starts."""
    if not text:
        raise SettingsError(f"{SECRETS} is not set; with {MODE}=oidc it names a secrets.toml")
    path = Path(text).expanduser().absolute()
    try:
        if path.stat().st_mode & 0o007:
            raise SettingsError(f"{path} ({SECRETS}) is open to others; fix: chmod o= {path}")
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # A TOML error quotes nothing of the file but a position
        raise SettingsError(f"{path} ({SECRETS}) cannot be read: {error}") from error
    section = content.get("auth", {})
    for name in ("redirect_uri", "cookie_secret", "client_id", "client_secret",
                 "server_metadata_url"):  # fmt: skip
        if not isinstance(section, dict) or not isinstance(section.get(name), str):
            raise SettingsError(f"{path} ({SECRETS}) has no text {name!r} in its section [auth]")
    if len(section["cookie_secret"]) < MIN_COOKIE_SECRET_CHARS:
        raise SettingsError(
            f"cookie_secret in {path} is too short: whoever guesses it is whoever they like; "
            f"allowed: {MIN_COOKIE_SECRET_CHARS} characters or more"
        )
    for name in ("redirect_uri", "server_metadata_url"):
        address = urlsplit(section[name])
        if address.scheme != "https" and not is_loopback(address.hostname or ""):
            raise SettingsError(
                f"{name} in {path} is {section[name]!r}; allowed: https, or http on this machine"
            )
    if not urlsplit(section["redirect_uri"]).path.endswith("/oauth2callback"):
        raise SettingsError(
            f"redirect_uri in {path} is {section['redirect_uri']!r}; allowed: the dashboard's "
            "address followed by /oauth2callback"
        )
    return path


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """A claim by its name, else by its path ("realm_access.roles")."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _values(claim: Any) -> list[str]:
    if isinstance(claim, str):
        return [claim]
    return [one for one in claim if isinstance(one, str)] if isinstance(claim, list) else []
