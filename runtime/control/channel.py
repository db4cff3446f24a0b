"""Authenticated message channels between controller and agents.

`multiprocessing.connection` does the framing and the mutual HMAC proof of the control key; payloads
are JSON bytes and never unpickled. The key comes from COUNTERPOISE_CONTROL_KEY or is minted by `up`
for its children.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)

from runtime.errors import UserError

CONTROL_KEY = "COUNTERPOISE_CONTROL_KEY"


def control_key() -> bytes:
    """The shared secret of this control plane.

    Raises:
        UserError: it is not set or too short.
    """
    key = os.environ.get(CONTROL_KEY, "")
    if len(key) < 16:
        raise UserError(
            f"{CONTROL_KEY} is {'too short' if key else 'not set'}; give the controller and every "
            "agent the same random text of at least 16 characters, for example from "
            "`python3 -c 'import secrets; print(secrets.token_hex(32))'`"
        )
    return key.encode()


def mint_control_key() -> str:
    return secrets.token_hex(32)


class Channel:
    """One end of a connection: `send` may be called from several threads, `receive` from one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, data: bytes) -> bool:
        """Send one message. False: the peer is gone."""
        try:
            with self._lock:
                self._connection.send_bytes(data)
        except (OSError, ValueError):
            return False
        return True

    def receive(self) -> bytes | None:
        """Next message, blocking; None when the peer is gone."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def listen(host: str, port: int) -> Listener:
    """Listen for agents; pass what it accepts to `admit`.

    Raises:
        UserError: the address cannot be bound.
    """
    try:
        return Listener((host, port), family="AF_INET", backlog=64)
    except OSError as error:
        raise UserError(
            f"control.port: cannot listen on {host}:{port} ({error.strerror}); "
            "choose another, or 0 for any free one"
        ) from error


def admit(connection: Connection, key: bytes) -> Channel:
    """Have the peer prove the key, and prove it to them. Blocks until the peer has answered.

    Raises:
        AuthenticationError: a wrong key; the connection is closed. OSError, EOFError: it is gone.
    """
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
    except (AuthenticationError, OSError, EOFError):
        connection.close()
        raise
    _send_at_once(connection)
    return Channel(connection)


def connect(host: str, port: int, key: bytes) -> Channel:
    """Connect to a controller. Raises OSError or AuthenticationError."""
    connection = Client((host, port), family="AF_INET", authkey=key)
    _send_at_once(connection)
    return Channel(connection)


def _send_at_once(connection: Connection) -> None:
    """Not hold small messages back until the last is acknowledged: 40 ms in every change."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
