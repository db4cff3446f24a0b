"""What another system posts of GPUs: Alertmanager's JSON, or a plain object for one GPU. Pure.

The plain object: {"gpu": "rack-0/3", "state": "draining", "reason": "..."}, with "severity" or an
Xid as "code" in place of "state". What does not say which GPU or how bad it is is refused.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from runtime.errors import CounterpoiseError
from runtime.health.catalogue import Catalogue
from runtime.health.observation import BADNESS, Observation, clipped, severity_of
from storage.records import GpuState, Severity

ALERT_LIMIT = 1000
KEPT_POSTS = 64
_NAME_LIMIT = 120
_STATES = ("healthy", "suspect", "degraded", "draining", "failed")
_STATE_OF: dict[Severity, GpuState] = {
    "info": "healthy", "warning": "suspect", "critical": "draining",
}  # fmt: skip
# Labels that name a GPU, the surest first; an exporter's bare index names none.
_GPU_LABELS = ("gpu", "UUID", "uuid", "pci_bus_id")
_STATE_LABEL = "counterpoise_state"


class PostError(CounterpoiseError):
    """A body that says nothing that can be used; the message names the fix."""


class Post(NamedTuple):
    """One thing said of one GPU. names: what it may be called, the surest first. key: what a later
    word on the same matter is known by. state: None when an Xid alone says how bad it is. ended:
    what was said by `key` no longer holds ("": everything). noted: evidence alone."""

    names: tuple[str, ...]
    key: str
    code: int | str
    state: GpuState | None
    reason: str
    ended: bool = False
    noted: bool = False


class _Plain(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    gpu: str
    reason: str = ""
    state: Literal["healthy", "suspect", "degraded", "draining", "failed"] | None = None
    severity: Severity | None = None
    code: int | str | None = None
    id: str = ""


class _Alert(msgspec.Struct, kw_only=True):
    status: Literal["firing", "resolved"]
    labels: dict[str, str]
    annotations: dict[str, str] = {}
    fingerprint: str = ""


class _Alerts(msgspec.Struct, kw_only=True):
    alerts: list[_Alert]


class Posted(NamedTuple):
    """A body, read. refused: a word on each alert that could not be used. id: the idempotency key
    that a plain object carries."""

    posts: list[Post]
    refused: list[str]
    id: str = ""


def read_body(body: bytes) -> Posted:
    """Posts of a body in either form.

    Raises:
        PostError: no JSON, or neither form.
    """
    try:
        data = msgspec.json.decode(body)
        if isinstance(data, dict) and "alerts" in data:
            return _from_alerts(msgspec.convert(data, _Alerts).alerts)
        plain = msgspec.convert(data, _Plain)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PostError(
            f'{error}; send {{"gpu": "RACK/SLOT", "state": "draining", "reason": "..."}} or what '
            "Alertmanager sends"
        ) from error
    return Posted([_from_plain(plain)], [], plain.id)


def _from_plain(plain: _Plain) -> Post:
    code = plain.code
    state: GpuState | None = plain.state
    if isinstance(code, int) and not 1 <= code <= 99_999:
        raise PostError(f"`code` is {code}; allowed: an Xid, 1 to 99999, or a word")
    noted = state is None and plain.severity == "info"
    if state is None and plain.severity is not None:
        state = _STATE_OF[plain.severity]
    if state is None and not isinstance(code, int):
        raise PostError(
            f"nothing says how bad it is: give `state` (one of {', '.join(_STATES)}), `severity` "
            "(info, warning, critical) or an Xid as `code`"
        )
    if state is not None and not plain.reason.strip():
        raise PostError("`reason` is empty; say what was seen, it is kept as evidence")
    word = code[:_NAME_LIMIT] if isinstance(code, str) else code or "reported"
    ended = state == "healthy" and not noted
    key = "" if ended and code is None else str(word)
    return Post((plain.gpu,), key, word, state, clipped(plain.reason), ended, noted)


def _from_alerts(alerts: list[_Alert]) -> Posted:
    posts, refused = list[Post](), list[str]()
    for number, alert in enumerate(alerts[:ALERT_LIMIT], 1):
        found = _from_alert(alert)
        if isinstance(found, Post):
            posts.append(found)
        else:
            refused.append(f"alert {number}: {found}")
    if len(alerts) > ALERT_LIMIT:
        refused.append(f"{len(alerts) - ALERT_LIMIT} alerts more than {ALERT_LIMIT} at once")
    return Posted(posts, refused)


def _from_alert(alert: _Alert) -> Post | str:
    """The post, or why there is none."""
    labels, told = alert.labels, alert.annotations
    names = tuple(labels[name] for name in _GPU_LABELS if labels.get(name))
    if not names:
        return f"no label names its GPU; give one of {', '.join(_GPU_LABELS)}"
    name = labels.get("alertname", "alert")[:_NAME_LIMIT]
    state: Any = labels.get(_STATE_LABEL, "")
    severity: Any = labels.get("severity", "")
    if not state:
        state = _STATE_OF.get(severity)
    if state not in _STATES:
        return (
            f"label severity is {severity[:40]!r}; allowed: {', '.join(_STATE_OF)}, or say "
            f"{_STATE_LABEL} (one of {', '.join(_STATES)})"
        )
    reason = told.get("summary") or told.get("description") or told.get("message") or name
    return Post(
        names, (alert.fingerprint or name)[:_NAME_LIMIT], name, state, clipped(reason),
        ended=alert.status == "resolved", noted=state == "healthy",
    )  # fmt: skip


class PostedWords:
    """What holds of each GPU by what was posted, and what a post changes of it."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._held: dict[str, dict[str, Post]] = {}

    def take(self, gpu: str, post: Post, at: float) -> Observation:
        """The post as an observation: an Xid or a note is an event, a state holds until it ends."""
        if post.state is None:
            entry = self._catalogue.entry(int(post.code))
            return _observation(
                gpu, post, entry.verdict, at, action=entry.immediate, text=post.reason
            )
        if post.noted and not post.ended:
            return _observation(gpu, post, "healthy", at, text=post.reason)
        held = self._held.setdefault(gpu, {})
        if post.ended:
            for key in [post.key] if post.key else list(held):
                held.pop(key, None)
        else:
            held.pop(post.key, None)
            held[post.key] = post
            if len(held) > KEPT_POSTS:
                del held[next(iter(held))]
        return self._whole_word(gpu, at)

    def _whole_word(self, gpu: str, at: float) -> Observation:
        """All that holds of a GPU: the worst, with the others named beside it."""
        held = sorted(self._held[gpu].values(), key=lambda each: -BADNESS[each.state or "healthy"])
        if not held:
            del self._held[gpu]
            text = "nothing is held against it"
            return Observation(source="webhook", gpu=gpu, at=at, text=text, snapshot=True)
        others = ", ".join(str(each.code) for each in held[1:])
        seen = _observation(gpu, held[0], held[0].state or "healthy", at, text=held[0].reason)
        return msgspec.structs.replace(seen, subcode=clipped(others) or None, snapshot=True)


def _observation(
    gpu: str, post: Post, verdict: GpuState, at: float, *, text: str, action: str = ""
) -> Observation:
    return Observation(
        source="webhook",
        gpu=gpu,
        code=post.code,
        severity=severity_of(verdict),
        verdict=verdict,
        action=action,
        at=at,
        text=text,
    )
