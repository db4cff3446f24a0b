"""The webhook: what other systems may post, over real HTTP, and what is refused with its fix."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.health.address_map import AddressMap
from runtime.health.catalogue import load_catalogue
from runtime.health.config import HealthConfig, VerdictConfig
from runtime.health.observation import Identity, Observation
from runtime.health.posted import KEPT_POSTS, Posted, PostedWords, PostError, read_body
from runtime.health.sources import webhook
from runtime.health.sources.watch import open_watch
from runtime.health.sources.webhook import BODY_LIMIT, PATH, TOKEN_VARIABLE, WebhookSource
from runtime.health.verdict import VerdictBook

GPUS = ("rack-0/0", "rack-0/1")
UUID = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
TOKEN = "a-token-of-a-monitoring-system"
CATALOGUE = load_catalogue()
JSON = {"Content-Type": "application/json"}


class Client:
    """Posts to a source that polls in a thread, as the watch does; keeps what it saw."""

    def __init__(self, source: WebhookSource) -> None:
        assert source.open().status == "watching", source.state
        self.source, self.seen = source, list[Observation]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _poll(self) -> None:
        while not self._stop.is_set():
            self.seen += self.source.poll(0.02)

    def ask(
        self,
        body: Any,
        headers: dict[str, str] | None = None,
        path: str = PATH,
        method: str = "POST",
    ) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        wire = http.client.HTTPConnection("127.0.0.1", self.source.port, timeout=10)
        wire.request(method, path, data, JSON | (headers or {}))
        answer = wire.getresponse()
        status, text = answer.status, answer.read()
        wire.close()
        return status, json.loads(text)

    def close(self) -> list[Observation]:
        """All that was seen."""
        self._stop.set()
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()
        self.source.close()
        return self.seen


def source_of(token: str = "", host: str = "127.0.0.1", port: int = 0) -> WebhookSource:
    addresses = AddressMap(GPUS)
    addresses.learn([Identity(pci="0000:9b:00.0", uuid=UUID), Identity(pci="0000:9c:00.0")])
    return WebhookSource(
        (host, port), CATALOGUE, locate=addresses.locate, gpus=GPUS, token=token,
        clock=lambda: 2_000_000_000.0,
    )  # fmt: skip


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client(source_of())
    yield client
    client.close()


def words(seen: list[Observation]) -> list[tuple[str | None, object, str]]:
    return [(each.gpu, each.code, each.verdict) for each in seen]


def alert(name: str, severity: str, status: str = "firing", **labels: str) -> dict[str, Any]:
    return {
        "status": status,
        "labels": {"alertname": name, "severity": severity} | labels,
        "annotations": {"summary": f"{name} on {labels.get('UUID', '?')}"},
        "startsAt": "2026-12-02T05:00:00Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "http://prometheus/graph",
        "fingerprint": f"{name}-{labels.get('UUID', '')}",
    }


def group(*alerts: dict[str, Any]) -> dict[str, Any]:
    """As Alertmanager sends it, version 4."""
    return {
        "version": "4", "groupKey": "{}:{}", "truncatedAlerts": 0, "status": "firing",
        "receiver": "counterpoise", "groupLabels": {}, "commonLabels": {},
        "commonAnnotations": {}, "externalURL": "http://alertmanager", "alerts": list(alerts),
    }  # fmt: skip


# what is taken ---------------------------------------------------------------------------------


def test_a_plain_report_by_any_name_of_the_gpu(client: Client) -> None:
    names = ("rack-0/0", UUID, "00000000:9B:00.0", "9b:00.0")
    for name in names:
        body = {"gpu": name, "state": "draining", "reason": f"burn-in failed for {name}"}
        assert client.ask(body) == (202, {"accepted": 1, "not_understood": []})
    seen = client.close()
    assert words(seen) == [("rack-0/0", "reported", "draining")] * len(names)
    assert seen[0].text == "burn-in failed for rack-0/0"
    assert all(each.source == "webhook" and each.snapshot for each in seen)


def test_severity_and_xid_in_place_of_a_state(client: Client) -> None:
    for body in (
        {"gpu": "rack-0/1", "severity": "warning", "reason": "hot aisle"},
        {"gpu": "rack-0/1", "severity": "critical", "code": "leak", "reason": "coolant"},
        {"gpu": "rack-0/1", "severity": "info", "code": "visit", "reason": "a look at the cables"},
        {"gpu": "rack-0/1", "code": 79},
        {"gpu": "rack-0/1", "code": 31, "reason": "seen in a job's log"},
    ):
        assert client.ask(body)[0] == 202, body
    seen = client.close()
    assert words(seen) == [
        ("rack-0/1", "reported", "suspect"),
        ("rack-0/1", "leak", "draining"),
        ("rack-0/1", "visit", "healthy"),
        ("rack-0/1", 79, "failed"),
        ("rack-0/1", 31, "healthy"),
    ]
    assert seen[1].subcode == "reported"
    assert [each.snapshot for each in seen] == [True, True, False, False, False]
    assert seen[3].action == "RESTART_BM"


def test_alerts_hold_until_each_is_resolved(client: Client) -> None:
    hot, lost = alert("GpuHot", "warning", UUID=UUID), alert("GpuLost", "critical", UUID=UUID)
    assert client.ask(group(hot, lost)) == (202, {"accepted": 2, "not_understood": []})
    assert client.ask(group(lost | {"status": "resolved"}))[0] == 202
    assert client.ask(group(hot | {"status": "resolved"}))[0] == 202
    seen = client.close()
    assert words(seen) == [
        ("rack-0/0", "GpuHot", "suspect"),
        ("rack-0/0", "GpuLost", "draining"),
        ("rack-0/0", "GpuHot", "suspect"),
        ("rack-0/0", None, "healthy"),
    ]
    book = VerdictBook(VerdictConfig())
    states = []
    for number, each in enumerate(seen):
        book.observe(each, 2e9 + 100 * number)
        book.tick(2e9 + 100 * number + 50)
        states.append(book.verdict("rack-0/0").state)
    assert states == ["suspect", "draining", "suspect", "healthy"]


def test_healthy_takes_back_what_was_posted_and_nothing_else(client: Client) -> None:
    client.ask({"gpu": "rack-0/0", "state": "failed", "code": "burn-in", "reason": "wrong sums"})
    client.ask({"gpu": "rack-0/0", "state": "suspect", "reason": "loud"})
    client.ask({"gpu": "rack-0/0", "state": "healthy", "code": "burn-in", "reason": "passed now"})
    client.ask({"gpu": "rack-0/0", "state": "healthy", "reason": "quiet"})
    seen = client.close()
    assert words(seen)[1:] == [
        ("rack-0/0", "burn-in", "failed"),
        ("rack-0/0", "reported", "suspect"),
        ("rack-0/0", None, "healthy"),
    ]
    book = VerdictBook(VerdictConfig())
    book.observe(
        Observation(
            source="report", gpu="rack-0/0", code="failed", verdict="failed", snapshot=True
        ),
        2e9,
    )
    for each in seen:
        book.observe(each, 2e9)
    book.tick(2e9 + 1000)
    assert book.verdict("rack-0/0").state == "failed"  # An operator's word stands.


def test_alerts_that_say_too_little_are_told_and_the_others_taken(client: Client) -> None:
    unclear = alert("Page", "page", UUID=UUID)
    ruled = alert("Ruled", "page", UUID=UUID, counterpoise_state="degraded")
    nameless = alert("NoGpu", "critical", instance="node-7")
    index = alert("Index", "critical", gpu="3")
    status, answer = client.ask(group(unclear, ruled, nameless, index))
    assert (status, answer["accepted"]) == (202, 1)
    first, second, third = answer["not_understood"]
    assert "severity is 'page'; allowed: info, warning, critical" in first
    assert "no label names its GPU" in second
    assert "no GPU of this host is called 3; it has rack-0/0 to rack-0/1" in third
    assert words(client.close()) == [("rack-0/0", "Ruled", "degraded")]


@pytest.mark.parametrize("by_header", [True, False])
def test_an_idempotency_key_counts_once(client: Client, by_header: bool) -> None:
    body = {"gpu": "rack-0/0", "code": 48, "reason": "x"} | ({} if by_header else {"id": "k1"})
    headers = {"Idempotency-Key": "k1"} if by_header else {}
    taken = {"accepted": 1, "not_understood": []}
    assert client.ask(body, headers) == (202, taken)
    assert client.ask(body, headers) == (200, {**taken, "duplicate": True})
    status, answer = client.ask({**body, "reason": "y"}, headers)
    assert status == 422
    assert "came with another body before" in answer["error"]
    assert len(client.close()) == 1


# what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "send {"),
        (b"\xff\xfe", 400, "send {"),
        (b"[" * 5000, 400, "send {"),
        ([], 400, "send {"),
        ({}, 400, "missing required field `gpu`"),
        ({"gpu": "rack-0/0", "sate": "failed"}, 400, "unknown field `sate`"),
        ({"gpu": "rack-0/0", "reason": "?"}, 400, "nothing says how bad it is"),
        ({"gpu": "rack-0/0", "code": "hot", "reason": "?"}, 400, "nothing says how bad it is"),
        ({"gpu": "rack-0/0", "state": "bad", "reason": "?"}, 400, "Invalid enum value 'bad'"),
        ({"gpu": "rack-0/0", "state": "failed"}, 400, "`reason` is empty"),
        ({"gpu": "rack-0/0", "code": 0}, 400, "allowed: an Xid, 1 to 99999"),
        ({"gpu": "rack-0/0", "code": True}, 400, "code"),
        ({"gpu": "rack-9/0", "code": 79}, 422, "no GPU of this host is called rack-9/0"),
        ({"alerts": 3}, 400, "send {"),
        ({"alerts": [alert("A", "page")]}, 422, "no label names its GPU"),
    ],
)
def test_bad_bodies_say_the_fix(client: Client, body: Any, status: int, words: str) -> None:
    got, answer = client.ask(body)
    assert (got, words in answer["error"]) == (status, True), answer
    assert client.close() == []


def test_bad_requests_say_the_fix(client: Client) -> None:
    good = {"gpu": "rack-0/0", "code": 79}
    assert client.ask(good, path="/")[0] == 404
    assert client.ask(good, method="PUT")[0] == 405
    assert client.ask(good, {"Content-Type": "text/plain"})[0] == 415
    assert client.ask(good, {"Host": "attacker.example"})[0] == 403
    status, answer = client.ask(b" " * (BODY_LIMIT + 1))
    assert (status, "larger than" in answer["error"]) == (413, True)
    assert client.ask(good)[0] == 202  # It still serves.
    assert len(client.close()) == 1


def test_a_token_is_asked_for_where_there_is_one() -> None:
    client = Client(source_of(TOKEN))
    good = {"gpu": "rack-0/0", "code": 79}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
        status, answer = client.ask(good, headers)
        assert (status, TOKEN_VARIABLE in answer["error"]) == (401, True)
    assert client.ask(good, {"Authorization": f"Bearer {TOKEN}", "Host": "gpu-7"})[0] == 202
    assert len(client.close()) == 1


def test_a_request_that_trickles_in_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "DEADLINE_S", 0.3)
    client = Client(source_of())
    slow = socket.create_connection(("127.0.0.1", client.source.port), timeout=10)
    slow.sendall(b"POST /health/report HTTP/1.1\r\nContent-Length: 10\r\n\r\n{")
    began = time.monotonic()
    assert client.ask({"gpu": "rack-0/0", "code": 79})[0] == 202
    assert time.monotonic() - began < 5.0
    slow.close()
    client.close()


# its state -------------------------------------------------------------------------------------


def test_beyond_this_machine_it_needs_a_token() -> None:
    for host in ("0.0.0.0", "::", "gpu-7.example"):
        state = source_of(host=host).open()
        assert (state.status, TOKEN_VARIABLE in state.reason) == ("denied", True)
    state = source_of("short").open()
    assert (state.status, "16 bytes or more" in state.reason) == ("denied", True)
    open_one = source_of(TOKEN, host="0.0.0.0")
    assert open_one.open().status == "watching"
    open_one.close()
    open_one.close()


def test_a_port_that_is_taken_is_told_and_tried_again() -> None:
    first = source_of()
    first.open()
    second = source_of(port=first.port)
    state = second.open()
    assert (state.status, "choose another" in state.reason) == ("failing", True)
    assert second.poll(0.0) == []
    first.close()
    assert second.open().status == "watching"
    second.close()


def test_it_is_off_unless_it_has_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    for port, names in ((0, []), (9400, ["webhook"])):
        watch = open_watch(
            HealthConfig(webhook_port=port), ["r/0"], lambda _seen: None, None, real=False
        )
        assert [state.name for state in watch.states()] == names


# whatever comes --------------------------------------------------------------------------------


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(PostError):
        assert isinstance(read_body(body), Posted)


TEXTS = st.text(max_size=12)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), TEXTS, st.lists(TEXTS, max_size=2))
FIELDS = st.sampled_from(["gpu", "state", "severity", "code", "reason", "id"])
ALERTS = st.fixed_dictionaries(
    {
        "status": st.sampled_from(["firing", "resolved"]),
        "labels": st.dictionaries(
            st.sampled_from(["gpu", "UUID", "severity", "alertname", "counterpoise_state"]),
            st.sampled_from(["a", "rack-0/0", "critical", "info", "failed", "healthy", "é"]),
        ),
    }
)


@given(
    st.lists(
        st.one_of(
            st.dictionaries(FIELDS, VALUES),
            st.builds(lambda alerts: {"alerts": alerts}, st.lists(ALERTS, max_size=5)),
        ),
        max_size=6,
    )
)
def test_any_json_becomes_words_within_bounds(bodies: list[Any]) -> None:
    kept = PostedWords(CATALOGUE)
    for body in bodies:
        try:
            posted = read_body(json.dumps(body).encode())
        except PostError:
            continue
        for post in posted.posts:
            seen = kept.take("rack-0/0", post, 2e9)
            assert seen.gpu == "rack-0/0"
            assert len(seen.text) <= 400


def test_what_is_kept_of_a_gpu_is_bounded() -> None:
    kept = PostedWords(CATALOGUE)
    for number in range(3 * KEPT_POSTS):
        body = {"gpu": "g", "state": "suspect", "code": f"c{number}", "reason": "r"}
        (post,) = read_body(json.dumps(body).encode()).posts
        seen = kept.take("rack-0/0", post, 2e9)
    assert len((seen.subcode or "").split(",")) <= KEPT_POSTS
    assert len(kept._held["rack-0/0"]) == KEPT_POSTS
