"""The searches for leaks find what there is to find."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tests.support import leaks


def test_listening_sockets_are_found_with_their_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as here, socket.socket() as everywhere:
        everywhere.bind(("0.0.0.0", 0))
        everywhere.listen()
        found = leaks.listening([os.getpid()])
        assert f"127.0.0.1:{here.getsockname()[1]}" in found
        assert f"0.0.0.0:{everywhere.getsockname()[1]}" in found


def test_listening_on_every_ipv6_address_is_found() -> None:
    with socket.socket(socket.AF_INET6) as six:
        six.bind(("::", 0))
        six.listen()
        assert f":::{six.getsockname()[1]}" in leaks.listening([os.getpid()])


def test_a_secret_is_found_wherever_it_lies(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "file.db").write_bytes(b"\x00\xffhush-hush\x00")
    (tmp_path / "clean").write_bytes(b"nothing")
    secrets = {"a key": "hush-hush", "another": "not there"}
    assert leaks.containing([tmp_path], secrets) == [f"{tmp_path}/deep/er/file.db: a key"]
    assert leaks.containing([tmp_path / "clean"], secrets) == []


def test_command_lines_are_read() -> None:
    assert "python" in leaks.command_lines([os.getpid()]).lower()
