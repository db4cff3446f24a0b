"""A file of any kind that health knows: what it is, and its observations as they come.

It reads the file; what the lines mean is the readers' to say.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from runtime.errors import UserError
from runtime.health.catalogue import Catalogue
from runtime.health.kernel_log import LINE_LIMIT, KernelLogReader
from runtime.health.observation import NotUnderstood, Observation
from runtime.health.prometheus import ExpositionReader
from runtime.health.reading import judge
from runtime.health.smi_xml import SmiError, SmiReader

FileKind = Literal["kernel_log", "nvidia_smi", "prometheus"]
_HEAD_BYTES = 65_536
_CHUNK_BYTES = 65_536
_NO_HANDLE = "Unable to determine the device handle"
_EXPOSITION = ("# HELP ", "# TYPE ", "DCGM_", "nvidia_smi_")


class ParsedFile:
    """One file. `events` may be read once; the rest is complete when it is through."""

    def __init__(self, path: Path, catalogue: Catalogue) -> None:
        self.path = path
        self.kind: FileKind = kind_of(_head(path))
        self.not_understood: list[NotUnderstood] = []
        self.num_not_understood = 0
        self.num_lines = 0
        self._catalogue = catalogue

    def events(self) -> Iterator[Observation]:
        """One observation per event (kernel log) or GPU (nvidia-smi, Prometheus).

        Raises:
            UserError: the file cannot be read, or is no XML of nvidia-smi after all.
        """
        read: dict[FileKind, Callable[[], Iterator[Observation]]] = {
            "kernel_log": self._kernel_log,
            "nvidia_smi": self._nvidia_smi,
            "prometheus": self._prometheus,
        }
        try:
            yield from read[self.kind]()
        except (OSError, SmiError) as error:
            raise UserError(f"{self.path}: {error}") from error

    def _kernel_log(self) -> Iterator[Observation]:
        year = datetime.datetime.fromtimestamp(self.path.stat().st_mtime, datetime.UTC).year
        reader = KernelLogReader(self._catalogue, year)
        yield from reader.read(bounded_lines(self.path))
        self.num_lines, self.num_not_understood = reader.num_lines, reader.num_not_understood
        self.not_understood = list(reader.not_understood)

    def _nvidia_smi(self) -> Iterator[Observation]:
        reader = SmiReader()
        readings = reader.read(_chunks(self.path))
        yield from (judge(reading, "nvidia_smi", self._catalogue) for reading in readings)
        self.not_understood = reader.not_understood
        self.num_not_understood = len(reader.not_understood)

    def _prometheus(self) -> Iterator[Observation]:
        reader = ExpositionReader()
        readings = reader.read(bounded_lines(self.path))
        yield from (judge(reading, "prometheus", self._catalogue) for reading in readings)
        self.num_lines, self.num_not_understood = reader.num_lines, reader.num_not_understood
        self.not_understood = list(reader.not_understood)


def kind_of(head: str) -> FileKind:
    """What a file is, by its beginning; what is nothing else is taken for a kernel log."""
    start = head.lstrip("\ufeff \t\r\n")
    is_xml = start.startswith("<") and not start[1:2].isdigit()
    if is_xml or "<nvidia_smi_log" in start or start.startswith(_NO_HANDLE):
        return "nvidia_smi"
    lines = start.splitlines()
    if any(line.lstrip().startswith(_EXPOSITION) for line in lines[:50]):
        return "prometheus"
    return "kernel_log"


def bounded_lines(path: Path) -> Iterator[str]:
    """Lines of a file, each at most twice LINE_LIMIT long, whatever its bytes are."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        while line := file.readline(2 * LINE_LIMIT):
            yield line
            while line and not line.endswith("\n"):
                line = file.readline(2 * LINE_LIMIT)  # The rest of an overlong line.


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def _chunks(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
