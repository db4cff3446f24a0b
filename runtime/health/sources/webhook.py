"""A webhook as a source: other systems post what they know of a GPU to this host's agent.

Off unless the config gives it a port. It answers in the thread that polls, one request at a time,
each bounded in size and time. Beyond this machine it listens only with a token.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import logging
import socket
import socketserver
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any

from runtime.health.catalogue import Catalogue
from runtime.health.observation import Identity, Observation, clipped
from runtime.health.posted import PostedWords, PostError, read_body
from runtime.health.sources.port import SourceState

TOKEN_VARIABLE = "COUNTERPOISE_WEBHOOK_TOKEN"
PATH = "/health/report"
BODY_LIMIT = 256 << 10
DEADLINE_S = 5.0
MIN_TOKEN_BYTES = 16
KEPT_KEYS = 1024
_DRAIN_BYTES = 8 << 20
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_LOG = logging.getLogger(__name__)


class _Refused(Exception):
    """Not taken: HTTP status, and a message with the fix."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class WebhookSource:
    """Listens for posts on `PATH`.

    Args:
        address: host and port to listen on.
        locate: GPU id of a name (rack/slot, UUID, serial number, PCI address), None when it is no
            GPU of this host.
        gpus: the host's GPU ids, for the answer to a name that is unknown.
        token: what a poster must bear; "" asks for none and serves this machine alone.
    """

    name = "webhook"
    waits = True

    def __init__(
        self,
        address: tuple[str, int],
        catalogue: Catalogue,
        *,
        locate: Callable[[str], str | None],
        gpus: Sequence[str],
        token: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.state = SourceState(self.name, "missing", "not opened yet")
        self._address = address
        self._locate = locate
        self._gpus = gpus
        self._token = token.encode()
        self._clock = clock
        self._words = PostedWords(catalogue)
        self._answered: OrderedDict[str, tuple[bytes, dict[str, Any]]] = OrderedDict()
        self._found: list[Observation] = []
        self._server: _Server | None = None

    @property
    def port(self) -> int:
        """Where it listens now; 0 when it does not."""
        return int(self._server.server_address[1]) if self._server is not None else 0

    def open(self) -> SourceState:
        self.close()
        host, port = self._address
        fix = f"set {TOKEN_VARIABLE} to {MIN_TOKEN_BYTES} bytes or more"
        if self._token and len(self._token) < MIN_TOKEN_BYTES:
            self.state = SourceState(self.name, "denied", f"the token is too short; {fix}")
        elif not self._token and not _is_local(host):
            self.state = SourceState(
                self.name, "denied", f"it does not listen on {host} without a token; {fix}"
            )
        else:
            try:
                self._server = _Server(host, port, self._answer)
                self.state = SourceState(self.name, "watching")
            except PermissionError as error:
                why = f"port {port}: {error.strerror}; choose one above 1023"
                self.state = SourceState(self.name, "denied", why)
            except OSError as error:
                why = f"{host}:{port}: {error.strerror or error}; choose another [health] webhook"
                self.state = SourceState(self.name, "failing", why)
        return self.state

    def poll(self, timeout_s: float) -> Sequence[Observation]:
        if self._server is None:
            return []
        self._server.timeout = timeout_s
        self._server.handle_request()
        found, self._found = self._found, []
        return found

    def identities(self) -> tuple[Sequence[Identity], bool]:
        return [], False

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.server_close()

    # one request -----------------------------------------------------------------------------

    def _answer(self, headers: Message, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and body of the answer; what was taken goes out with the next poll."""
        try:
            self._admit(headers)
            return self._take(body, headers.get("Idempotency-Key", ""))
        except _Refused as refused:
            return refused.status, {"error": str(refused)}
        except PostError as error:
            return 400, {"error": str(error)}

    def _admit(self, headers: Message) -> None:
        given = headers.get("Authorization", "")
        if self._token:
            expected = b"Bearer " + self._token
            if not hmac.compare_digest(given.encode("utf-8", "replace"), expected):
                raise _Refused(401, f"send the header Authorization: Bearer ${TOKEN_VARIABLE}")
        elif _host_name(headers.get("Host", "")) not in _LOCAL_NAMES:
            # A page in a browser of this machine must not post under a name of its own.
            raise _Refused(403, f"without a token only 127.0.0.1 is served; set {TOKEN_VARIABLE}")
        kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise _Refused(415, f"Content-Type is {kind[:80]!r}; send application/json")

    def _take(self, body: bytes, key: str) -> tuple[int, dict[str, Any]]:
        posted = read_body(body)
        key, digest = (key or posted.id)[:200], hashlib.sha256(body).digest()
        before = self._answered.get(key) if key else None
        if before is not None and before[0] != digest:
            raise _Refused(422, f"the idempotency key {key!r} came with another body before")
        if before is not None:
            return 200, {**before[1], "duplicate": True}
        placed, refused = [], list(posted.refused)
        for post in posted.posts:
            gpu = next(filter(None, map(self._locate, post.names)), None)
            if gpu is None:
                refused.append(
                    f"no GPU of this host is called {clipped(' or '.join(post.names))}; it has "
                    f"{self._gpus[0]} to {self._gpus[-1]}, by UUID and PCI address too"
                )
            else:
                placed.append((gpu, post))
        if refused:
            _LOG.warning("webhook: %d not understood: %s", len(refused), refused[0])
        if refused and not placed:
            raise _Refused(422, "; ".join(refused[:5]))
        now = self._clock()
        self._found += [self._words.take(gpu, post, now) for gpu, post in placed]
        answer = {"accepted": len(placed), "not_understood": refused}
        if key:
            self._answered[key] = (digest, answer)
            if len(self._answered) > KEPT_KEYS:
                self._answered.popitem(last=False)
        return 202, answer


class _Server(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[Message, bytes], tuple[int, dict[str, Any]]],
    ) -> None:
        self.answer = answer
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.debug("webhook: a request of %s broke off", client_address, exc_info=True)


class _Request(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "counterpoise", ""
    timeout = DEADLINE_S

    def handle(self) -> None:
        """One request within the deadline, however slowly its bytes trickle in."""
        end = threading.Timer(DEADLINE_S, self._give_up)
        end.daemon = True
        end.start()
        try:
            super().handle()
        finally:
            end.cancel()

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._send(411, {"error": "send a Content-Length"})
        elif int(length[:20]) > BODY_LIMIT:
            # Read past it: a client that still sends would not see the answer.
            left = min(int(length[:20]), _DRAIN_BYTES)
            while left > 0 and (data := self.rfile.read(min(left, 65_536))):
                left -= len(data)
            self._send(413, {"error": f"the body is larger than {BODY_LIMIT} bytes; send less"})
        else:
            body = self.rfile.read(int(length))
            if len(body) < int(length):
                self._send(400, {"error": "the body is shorter than its Content-Length"})
            elif self.path != PATH:
                self._send(404, {"error": f"there is nothing here; post to {PATH}"})
            else:
                self._send(*self.server.answer(self.headers, body))

    def do_GET(self) -> None:
        self._send(405, {"error": f"post to {PATH}"}, {"Allow": "POST"})

    do_PUT = do_DELETE = do_GET  # noqa: N815 - http.server's names

    def _send(
        self, status: int, answer: Mapping[str, Any], extra: Mapping[str, str] | None = None
    ) -> None:
        data = json.dumps(answer).encode() + b"\n"
        self.send_response(status)
        for name, value in (extra or {}).items():
            self.send_header(name, value)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        _LOG.debug("webhook: " + format, *args)


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(header: str) -> str:
    """The Host header without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()
