"""Serves the exposition over HTTP: /metrics, and nothing else that is worth asking for.

However many ask, the live store is read at most once a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from runtime.errors import UserError
from runtime.metrics.exposition import CONTENT_TYPE

FRESH_S = 1.0
IDLE_S = 10.0


class MetricsServer:
    """Context manager around the listening server.

    Args:
        host, port: where to listen; port 0 is any free one.
        collect: makes the exposition.

    Raises:
        UserError: the address cannot be had.
    """

    def __init__(self, host: str, port: int, collect: Callable[[], str]) -> None:
        self._collect = collect
        self._lock = threading.Lock()
        self._text, self._made_at = b"", -FRESH_S
        try:
            self._server = ThreadingHTTPServer((host, port), self._handler())
        except OSError as error:
            raise UserError(
                f"cannot listen on {host}:{port}: {error.strerror}; give another --host or --port"
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,))

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def text(self) -> bytes:
        """The exposition, at most a second old."""
        with self._lock:
            if time.monotonic() - self._made_at >= FRESH_S:
                self._text, self._made_at = self._collect().encode(), time.monotonic()
            return self._text

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = IDLE_S

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "the metrics are at /metrics")
                    return
                body = server.text()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return

        return Handler
