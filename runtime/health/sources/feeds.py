"""Feeds of kernel log lines: /dev/kmsg, journald, a file that is rotated."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import time
from io import BufferedReader
from pathlib import Path

_CHUNK_BYTES = 65_536
_LINE_BYTES = 16_384
_LINES_A_CALL = 20_000
_PAUSE_S = 0.1


def _readable(fd: int, timeout_s: float) -> bool:
    """Whether there is something to read within `timeout_s`; any descriptor, beyond 1023 too."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(timeout_s * 1000))


class _Lines:
    """Bytes into whole lines, with bounded memory."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[str]:
        *whole, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LINE_BYTES:]
        return [line[:_LINE_BYTES].decode("utf-8", "replace") for line in whole]

    def clear(self) -> None:
        self._rest = b""


class KmsgFeed:
    """/dev/kmsg from now on; one read is one record."""

    name = "kmsg"

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._path = path
        self._file = -1

    def open(self) -> None:
        self.close()
        self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(self._file, 0, os.SEEK_END)

    def lines(self, timeout_s: float) -> list[str]:
        found: list[str] = []
        if not _readable(self._file, timeout_s):
            return found
        while len(found) < _LINES_A_CALL:
            try:
                record = os.read(self._file, _LINE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # Records were overwritten before we came; go on with what is left.
                raise
            if not record:
                break
            found += record.decode("utf-8", "replace").splitlines()
        return found

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class JournaldFeed:
    """journald's kernel messages, by a `journalctl` that follows."""

    name = "journald"
    COMMAND = ("journalctl", "-k", "-f", "-n", "0", "-o", "short-iso", "--no-pager")

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._lines = _Lines()

    def open(self) -> None:
        self.close()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def lines(self, timeout_s: float) -> list[str]:
        process = self._process
        if process is None or process.stdout is None:
            raise OSError(errno.EBADF, "journalctl does not run")
        if not _readable(process.stdout.fileno(), timeout_s):
            return []
        data = os.read(process.stdout.fileno(), _CHUNK_BYTES)
        if not data:
            raise OSError(errno.EPIPE, f"journalctl ended with exit code {process.wait(timeout=5)}")
        return self._lines.take(data)

    def close(self) -> None:
        process, self._process = self._process, None
        self._lines.clear()
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=5)
        if process.stdout is not None:
            process.stdout.close()


class FileFeed:
    """A log file from its present end; goes on with the new one when it is rotated or cut."""

    name = "kernel_log"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BufferedReader | None = None
        self._lines = _Lines()

    def open(self) -> None:
        self.close()
        self._file = self._path.open("rb")
        self._file.seek(0, os.SEEK_END)

    def lines(self, timeout_s: float) -> list[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            assert self._file is not None
            data = self._file.read(_CHUNK_BYTES)
            if data:
                return self._lines.take(data)
            if self._rotated():
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                return []
            time.sleep(min(_PAUSE_S, left))

    def _rotated(self) -> bool:
        """Whether another file goes by the name now, or this one was cut; it is then open."""
        assert self._file is not None
        ours = os.fstat(self._file.fileno())
        try:
            theirs = self._path.stat()
        except FileNotFoundError:
            return False  # Between two files: the next look finds the new one.
        if (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino):
            if self._file.peek(1):
                return True  # What was written to the old file meanwhile comes first.
            self._file.close()
            self._file = self._path.open("rb")
            self._lines.clear()
            return True
        if theirs.st_size < self._file.tell():
            self._file.seek(0)
            self._lines.clear()
            return True
        return False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lines.clear()
