"""Real endpoints for notices: an HTTP server and an SMTP server on 127.0.0.1, over socketserver.

Both keep what they got and can be told to answer otherwise. Their end is part of every test.
"""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message
from email.policy import default
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Post:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class HttpEndpoint:
    """status, headers: of the answers to come. delay_s: how long it takes over each."""

    port: int = 0
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    posts: list[Post] = field(default_factory=list)

    def url(self, path: str = "/hook") -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@contextmanager
def _serving(server: socketserver.BaseServer) -> Iterator[int]:
    """Serve on a thread; the port."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield int(server.server_address[1])  # type: ignore[index]
        finally:
            server.shutdown()
            thread.join(10)


@contextmanager
def http_endpoint() -> Iterator[HttpEndpoint]:
    endpoint, hurry = HttpEndpoint(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            endpoint.posts.append(Post(self.path, dict(self.headers.items()), body))
            hurry.wait(endpoint.delay_s)
            self.send_response(endpoint.status)
            for name, value in endpoint.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with _serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as endpoint.port:
        try:
            yield endpoint
        finally:
            hurry.set()


@dataclass
class SmtpEndpoint:
    """refusal: the answer to DATA, "" takes the message. logins: what AUTH PLAIN sent."""

    port: int = 0
    refusal: str = ""
    recipients: list[str] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


@contextmanager
def smtp_endpoint() -> Iterator[SmtpEndpoint]:
    endpoint = SmtpEndpoint()

    class Handler(socketserver.StreamRequestHandler):
        timeout = 10.0

        def handle(self) -> None:
            self._say("220 test")
            while line := self.rfile.readline():
                word, _, rest = line.decode().strip().partition(" ")
                if word.upper() == "QUIT":
                    self._say("221 bye")
                    return
                self._answer(word.upper(), rest)

        def _answer(self, word: str, rest: str) -> None:
            if word == "EHLO":
                self._say("250-test\r\n250 AUTH PLAIN")
            elif word == "AUTH":
                endpoint.logins.append(rest)
                self._say("235 in")
            elif word == "RCPT":
                endpoint.recipients.append(rest)
                self._say("250 ok")
            elif word == "DATA":
                self._data()
            else:
                self._say("250 ok")

        def _data(self) -> None:
            if endpoint.refusal:
                self._say(endpoint.refusal)
                return
            self._say("354 go on")
            lines = []
            while (line := self.rfile.readline()) not in (b".\r\n", b""):
                lines.append(line)
            endpoint.messages.append(message_from_bytes(b"".join(lines), policy=default))
            self._say("250 taken")

        def _say(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

    with _serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)) as endpoint.port:
        yield endpoint


def closed_port() -> int:
    """A port of 127.0.0.1 where nobody listens."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        return int(server.server_address[1])
