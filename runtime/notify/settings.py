"""Whom to tell and where the dashboard is, from the environment alone: addresses here are secrets.

A webhook's address lets whoever knows it post, so it is never shown: a channel is known by its kind
and host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from runtime.notify.notice import DEFAULT_BASE_URL
from storage.settings import SettingsError

BASE_URL = "COUNTERPOISE_BASE_URL"
WEBHOOKS = "COUNTERPOISE_NOTIFY_WEBHOOKS"
WEBHOOK_KEY = "COUNTERPOISE_NOTIFY_WEBHOOK_KEY"
SLACK = "COUNTERPOISE_NOTIFY_SLACK"
SMTP = "COUNTERPOISE_NOTIFY_SMTP"
MAIL_FROM = "COUNTERPOISE_NOTIFY_FROM"
MAIL_TO = "COUNTERPOISE_NOTIFY_TO"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SMTP_FORMS = (
    "smtp://[user:password@]host[:587] (STARTTLS; without it on this machine's own addresses alone)"
    " or smtps://[user:password@]host[:465]"
)


@dataclass(frozen=True, kw_only=True)
class MailSettings:
    """How to send e-mail. tls: "implicit", "starttls", or "none" (this machine's own addresses)."""

    host: str
    port: int
    tls: str
    sender: str
    recipients: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class NotifySettings:
    """Where notices go. webhook_key: signs what generic webhooks get."""

    base_url: str = DEFAULT_BASE_URL
    webhooks: tuple[str, ...] = field(default=(), repr=False)
    webhook_key: str = field(default="", repr=False)
    slack: tuple[str, ...] = field(default=(), repr=False)
    mail: MailSettings | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.webhooks or self.slack or self.mail)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> NotifySettings:
        """Read the environment (or `env`).

        Raises:
            SettingsError: names the variable, its (redacted) value and what is allowed.
        """
        env = os.environ if env is None else env
        (base,) = _addresses(env, BASE_URL) or (DEFAULT_BASE_URL,)
        return cls(
            base_url=base.rstrip("/"),
            webhooks=_addresses(env, WEBHOOKS),
            webhook_key=env.get(WEBHOOK_KEY, "").strip(),
            slack=_addresses(env, SLACK),
            mail=_mail(env),
        )


def _addresses(env: Mapping[str, str], variable: str) -> tuple[str, ...]:
    """The http(s) addresses in a variable, apart by spaces; the base is one only."""
    words = tuple(dict.fromkeys(env.get(variable, "").split()))
    for word in words:
        parts = _split(word)
        if parts is None or parts.scheme not in ("http", "https"):
            raise SettingsError(
                f"{variable} holds {_shown(word)!r}; allowed: http:// or https:// addresses, "
                "apart by spaces"
            )
    if variable == BASE_URL and len(words) > 1:
        raise SettingsError(f"{variable} holds {len(words)} addresses; allowed: one")
    return words


def _mail(env: Mapping[str, str]) -> MailSettings | None:
    url = env.get(SMTP, "").strip()
    sender, to = env.get(MAIL_FROM, "").strip(), env.get(MAIL_TO, "")
    recipients = tuple(to.replace(",", " ").split())
    if not url:
        if sender or recipients:
            raise SettingsError(
                f"{SMTP} is not set, but {MAIL_FROM} or {MAIL_TO} is; set all three"
            )
        return None
    parts = _split(url)
    if parts is None or parts.scheme not in ("smtp", "smtps"):
        raise SettingsError(f"{SMTP} is {_shown(url)!r}; allowed: {_SMTP_FORMS}")
    for variable, given in ((MAIL_FROM, (sender,)), (MAIL_TO, recipients)):
        if not given or any(one.count("@") != 1 or not one.isprintable() for one in given):
            raise SettingsError(
                f"{variable} is {env.get(variable, '')!r}; allowed: name@host, "
                "several apart by commas (COUNTERPOISE_NOTIFY_TO alone)"
            )
    is_implicit, host = parts.scheme == "smtps", str(parts.hostname)
    tls = "implicit" if is_implicit else "none" if host in LOOPBACK else "starttls"
    return MailSettings(
        host=host,
        port=parts.port or (465 if is_implicit else 587),
        tls=tls,
        sender=sender,
        recipients=recipients,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
    )


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts if parts.hostname else None


def _shown(url: str) -> str:
    """What may be said of a secret address: its scheme and host."""
    parts = _split(url)
    return f"{parts.scheme}://{parts.hostname}/***" if parts else "***"
