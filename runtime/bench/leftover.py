"""Which processes belong to a home folder, told by the environment they were started with.

Children inherit the environment, so nothing that a run starts escapes by changing its name or
group.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PROC = Path("/proc")


def processes_of(variable: str, value: str) -> list[str]:
    """Processes of this user that run with `variable` set to `value`, one line each.

    Where there is no /proc it goes by command lines that name `value`.
    """
    if not PROC.is_dir():
        listing = subprocess.run(
            ["ps", "-A", "-o", "pid=,command="], check=True, capture_output=True, text=True
        ).stdout.splitlines()
        return [line.strip() for line in listing if value in line]
    wanted = f"{variable}={value}".encode()
    found = []
    for folder in PROC.iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                found.append(f"{folder.name} {command.strip()}")
        except OSError:
            continue  # It has ended meanwhile, or is somebody else's.
    return found
