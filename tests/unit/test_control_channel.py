"""The channel between controller and agents: who gets in, and what garbage does."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener

import pytest

from runtime.control import messages as m
from runtime.control.channel import (
    CONTROL_KEY,
    Channel,
    admit,
    connect,
    control_key,
    listen,
    mint_control_key,
)
from runtime.errors import UserError

KEY = b"a key of thirty-two characters.."


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listen("127.0.0.1", 0) as made:
        yield made


def accept(listener: Listener, key: bytes, admitted: list[object]) -> threading.Thread:
    def run() -> None:
        try:
            admitted.append(admit(listener.accept(), key))
        except (AuthenticationError, EOFError, OSError) as error:
            admitted.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_messages_go_both_ways(listener: Listener) -> None:
    admitted: list[object] = []
    thread = accept(listener, KEY, admitted)
    ours = connect(*listener.address, KEY)  # type: ignore[misc]
    thread.join(timeout=5.0)
    (theirs,) = admitted
    assert isinstance(theirs, Channel)
    for end in (ours, theirs):
        # Else a burst of small messages waits 40 ms for an acknowledgement.
        with socket.socket(fileno=os.dup(end._connection.fileno())) as same:
            assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    hello = m.AgentHello(host="a", pid=1, gpus=("r/0",), workers={"r/0": 7})
    assert ours.send(m.encode(hello))
    data = theirs.receive()
    assert data is not None
    assert m.decode_from_agent(data) == hello
    ours.close()
    assert theirs.receive() is None
    assert not ours.send(b"x")
    theirs.close()


def test_a_wrong_key_is_refused_on_both_sides(listener: Listener) -> None:
    admitted: list[object] = []
    thread = accept(listener, KEY, admitted)
    with pytest.raises(AuthenticationError):
        connect(*listener.address, b"another key of some length......")  # type: ignore[misc]
    thread.join(timeout=5.0)
    assert isinstance(admitted[0], AuthenticationError)


def test_a_peer_that_goes_away_during_the_proof(listener: Listener) -> None:
    admitted: list[object] = []
    thread = accept(listener, KEY, admitted)
    socket.create_connection(listener.address).close()  # type: ignore[arg-type]
    thread.join(timeout=5.0)
    assert isinstance(admitted[0], EOFError | OSError)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe", b"[]", b"{}", b'{"type":"worker_ready"}', b'{"type":"nothing","gpu":"x"}'],
)
def test_garbage_is_an_error_of_its_own(data: bytes) -> None:
    for decode in (
        m.decode_from_agent,
        m.decode_from_worker,
        m.decode_to_agent,
        m.decode_to_worker,
    ):
        with pytest.raises(m.MessageError):
            decode(data)


def test_an_order_of_an_agent_is_none_of_a_worker() -> None:
    with pytest.raises(m.MessageError):
        m.decode_to_worker(m.encode(m.KillWorker(gpu="r/0")))


@pytest.mark.parametrize(("value", "word"), [(None, "not set"), ("short", "too short")])
def test_the_key_must_be_there_and_long_enough(
    monkeypatch: pytest.MonkeyPatch, value: str | None, word: str
) -> None:
    if value is not None:
        monkeypatch.setenv(CONTROL_KEY, value)
    with pytest.raises(UserError, match=word):
        control_key()
    monkeypatch.setenv(CONTROL_KEY, mint_control_key())
    assert len(control_key()) == 64


def test_a_port_in_use_is_said_with_the_fix(listener: Listener) -> None:
    with pytest.raises(UserError, match=r"control.port: cannot listen .* or 0 for any free one"):
        listen(*listener.address)  # type: ignore[misc]
