"""The ways out: a generic webhook, a Slack-compatible one, e-mail. Each sends one notice or raises.

Every attempt has a deadline. Redirects are not followed: a notice goes where it was meant to go.
"""

from __future__ import annotations

import hashlib
import hmac
import smtplib
import ssl
import urllib.error
import urllib.request
from email.message import EmailMessage
from email.utils import formatdate
from http.client import HTTPException
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from runtime.errors import CounterpoiseError
from runtime.notify.notice import Notice
from runtime.notify.settings import MailSettings, NotifySettings

TIMEOUT_S = 10.0
# What is wrong with the message itself; all else (a wrong address too) may be mended
_UNWANTED = (400, 413, 415, 422)
_SLACK_TEXT = 2900
_MARKS = {"critical": "CRITICAL", "warning": "WARNING", "info": "INFO"}


class NotDelivered(CounterpoiseError):
    """The endpoint is away or asks to wait. retry_after_s: how long it asked for, 0 not at all."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Refused(CounterpoiseError):
    """The endpoint will not take this notice however often it is sent."""


class Channel(Protocol):
    """One way out. name: lasting, unique, without secrets."""

    @property
    def name(self) -> str: ...

    def send(self, notice: Notice) -> None:
        """Deliver one notice.

        Raises:
            NotDelivered: try again later. Refused: do not.
        """


def open_channels(settings: NotifySettings) -> list[Channel]:
    """One channel for each address that is set."""
    found: list[Channel] = [
        Webhook(url, settings.base_url, settings.webhook_key) for url in settings.webhooks
    ]
    found += [SlackWebhook(url, settings.base_url) for url in settings.slack]
    if settings.mail is not None:
        found.append(Mail(settings.mail, settings.base_url))
    return found


def payload(notice: Notice, base_url: str) -> dict[str, Any]:
    """What a generic webhook gets. id: the idempotency key; url: deep link."""
    return {"schema": 1, **msgspec.to_builtins(notice), "url": notice.url(base_url)}


class Webhook:
    """POST of JSON. With a key it is signed: header Counterpoise-Signature, HMAC-SHA256 of the
    body."""

    def __init__(self, url: str, base_url: str, key: str = "") -> None:
        self._url, self._base, self._key = url, base_url, key
        self.name = _name("webhook", url)

    def send(self, notice: Notice) -> None:
        body = msgspec.json.encode(payload(notice, self._base))
        headers = {"Idempotency-Key": notice.id}
        if self._key:
            digest = hmac.new(self._key.encode(), body, hashlib.sha256).hexdigest()
            headers["Counterpoise-Signature"] = f"sha256={digest}"
        _post(self._url, body, headers)


class SlackWebhook:
    """POST of a message with blocks, as Slack, Mattermost and others take it."""

    def __init__(self, url: str, base_url: str) -> None:
        self._url, self._base = url, base_url
        self.name = _name("slack", url)

    def send(self, notice: Notice) -> None:
        message = slack_message(notice, self._base)
        _post(self._url, msgspec.json.encode(message), {"Idempotency-Key": notice.id})


def slack_message(notice: Notice, base_url: str) -> dict[str, Any]:
    """text: for notifications and for clients without blocks."""
    head = f"{_MARKS[notice.severity]} {_slack(notice.title)}"
    link = f"<{_slack(notice.url(base_url))}|Open in Counterpoise>"
    lines = [f"*{head}*", _slack(notice.text), link]
    said = "\n".join(line for line in lines if line)[:_SLACK_TEXT]
    return {
        "text": f"{head} ({_slack(notice.run_name)}) {notice.url(base_url)}",
        "blocks": [
            {
                "type": "section",
                "block_id": notice.id[:255],
                "text": {"type": "mrkdwn", "text": said},
            },
            {
                "type": "context",
                "elements": [{"type": "mrkdwn", "text": _slack(f"run {notice.run_name}")}],
            },
        ],
    }


class Mail:
    """One message per notice. Its Message-ID follows from the notice's id."""

    def __init__(self, settings: MailSettings, base_url: str) -> None:
        self._settings, self._base = settings, base_url
        self.name = f"e-mail {settings.host}"

    def send(self, notice: Notice) -> None:
        settings = self._settings
        message = mail_message(notice, settings, self._base)
        try:
            with self._connect() as server:
                if settings.user:
                    server.login(settings.user, settings.password)
                server.send_message(message)
        except smtplib.SMTPResponseException as error:
            said = f"{error.smtp_code} {_text(error.smtp_error)}"
            # A wrong password may be mended; a message that is not wanted will not be
            if error.smtp_code >= 500 and not isinstance(error, smtplib.SMTPAuthenticationError):
                raise Refused(said) from error
            raise NotDelivered(said) from error
        except smtplib.SMTPRecipientsRefused as error:
            raise Refused(f"all recipients refused: {sorted(error.recipients)}") from error
        except (smtplib.SMTPException, OSError) as error:
            raise NotDelivered(str(error) or type(error).__name__) from error

    def _connect(self) -> smtplib.SMTP:
        settings = self._settings
        if settings.tls == "implicit":
            context = ssl.create_default_context()
            return smtplib.SMTP_SSL(
                settings.host, settings.port, timeout=TIMEOUT_S, context=context
            )
        server = smtplib.SMTP(settings.host, settings.port, timeout=TIMEOUT_S)
        if settings.tls == "starttls":
            try:
                server.starttls(context=ssl.create_default_context())
            except BaseException:
                server.close()
                raise
        return server


def mail_message(notice: Notice, settings: MailSettings, base_url: str) -> EmailMessage:
    """Plain text: the title, what is known, the link."""
    message = EmailMessage()
    message["From"], message["To"] = settings.sender, ", ".join(settings.recipients)
    message["Subject"] = _line(f"[{notice.run_name}] {notice.title}")
    message["Date"] = formatdate(notice.at)
    digest = hashlib.sha256(notice.id.encode()).hexdigest()[:32]
    message["Message-ID"] = f"<{digest}@counterpoise>"
    message["X-Counterpoise-Id"] = _line(notice.id)
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(
        f"{notice.title}\n\n{notice.text}\n\n{notice.url(base_url)}\n\n"
        f"Run {notice.run_name} ({notice.run}), {notice.severity}.\n"
    )
    return message


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _post(url: str, body: bytes, headers: dict[str, str]) -> None:
    request = urllib.request.Request(
        url,
        data=body,
        headers={"Content-Type": "application/json", "User-Agent": "counterpoise", **headers},
    )
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as reply:
            reply.read(1024)
    except urllib.error.HTTPError as error:
        with error:
            said = f"{error.code} {error.reason}: {_text(error.read(200))}".rstrip(": ")
        if error.code in _UNWANTED:
            raise Refused(said) from error
        raise NotDelivered(said, _seconds(error.headers.get("Retry-After"))) from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise NotDelivered(str(reason) or type(error).__name__) from error


def _name(kind: str, url: str) -> str:
    """A name that tells two addresses of one host apart and gives neither away."""
    return f"{kind} {urlsplit(url).hostname} {hashlib.sha256(url.encode()).hexdigest()[:6]}"


def _slack(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _line(text: str) -> str:
    return " ".join(text.split())


def _text(data: bytes | str) -> str:
    return _line(data.decode(errors="replace") if isinstance(data, bytes) else data)[:200]


def _seconds(value: str | None) -> float:
    try:
        return max(0.0, float(value or 0.0))
    except ValueError:  # a date: our own pause will do
        return 0.0
