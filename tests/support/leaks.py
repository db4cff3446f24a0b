"""What must not be: sockets that listen for others, and secrets where somebody could find them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

LISTENS = "0A"


def listening(pids: Iterable[int]) -> list[str]:
    """Addresses (address:port) at which these processes wait for TCP connections."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in inodes:
                found.append(_address(fields[1], family))
    return sorted(found)


def containing(folders: Iterable[Path], secrets: Mapping[str, str]) -> list[str]:
    """`file: name of the secret` for every file below `folders` that holds one of `secrets`."""
    found = []
    for folder in folders:
        files = [folder] if folder.is_file() else folder.rglob("*")
        for path in files:
            if path.is_file() and not path.is_symlink():
                body = path.read_bytes()
                found += [f"{path}: {k}" for k, value in secrets.items() if value.encode() in body]
    return found


def command_lines(pids: Iterable[int]) -> str:
    """What everybody on the machine can see of these processes."""
    lines = []
    for pid in pids:
        try:
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return "\n".join(lines)


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    except OSError:
        pass
    return inodes


def _address(text: str, family: socket.AddressFamily) -> str:
    """As /proc writes it: words in the machine's byte order, in hexadecimal."""
    host, port = text.split(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return f"{socket.inet_ntop(family, packed)}:{int(port, 16)}"
