"""The training text as bytes; sample i is a function of seed and i alone, never of a rank."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from runtime.config import TrainConfig
from runtime.errors import UserError

_MAX_BYTES = 8_000_000
_STDLIB_MAX_BYTES = 4_000_000
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


class Text:
    """Bytes of the training text, cut into overlapping samples of `seq_len + 1` tokens.

    Raises:
        UserError: the text is missing or shorter than one sample.
    """

    def __init__(self, train: TrainConfig) -> None:
        data = _read(train.text)
        self._length = train.seq_len + 1
        if len(data) < self._length:
            raise UserError(
                f"`train.text` {train.text or '(standard library)'!r} has {len(data)} bytes; one "
                f"sample needs {self._length} (`train.seq_len` + 1): name a longer text"
            )
        self._bytes = np.frombuffer(data, dtype=np.uint8)
        self._seed = train.seed
        self._window = np.arange(self._length)
        self.checksum = zlib.crc32(data)
        self.largest_token = int(self._bytes.max())

    def samples(self, first: int, last: int) -> torch.Tensor:
        """Tokens of samples `[first, last)`, int64 `(last - first, seq_len + 1)`."""
        index = np.arange(first, last, dtype=np.uint64)
        starts = _scramble(index, self._seed) % np.uint64(len(self._bytes) - self._length + 1)
        rows = starts.astype(np.int64)[:, None] + self._window
        return torch.from_numpy(self._bytes[rows].astype(np.int64))


def _scramble(index: np.ndarray, seed: int) -> np.ndarray:
    """splitmix64 of (seed, index), uint64."""
    with np.errstate(over="ignore"):
        golden = np.uint64(0x9E3779B97F4A7C15)
        z = index * golden + np.uint64(seed % 2**63) * np.uint64(0xD1B54A32D192ED03) + golden
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _read(text: str) -> bytes:
    if not text:
        root = Path(sysconfig.get_path("stdlib"))
        return _concatenate(_files(root, suffix=".py"), _STDLIB_MAX_BYTES)
    path = Path(text).expanduser()
    if path.is_dir():
        return _concatenate(_files(path, suffix=""), _MAX_BYTES)
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise UserError(
            f"`train.text` {text!r} cannot be read ({error.strerror}): name a text file or a "
            "folder, or leave it empty for the standard library"
        ) from error


def _files(root: Path, suffix: str) -> Iterator[Path]:
    """Regular files below `root` in one order on every machine; hidden ones are left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and not (suffix and name in _STDLIB_SKIPPED)
        )
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                yield path


def _concatenate(files: Iterator[Path], limit: int) -> bytes:
    """The first `limit` bytes of the files that can be read; binary files are skipped."""
    out = bytearray()
    for path in files:
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if b"\0" not in content[:1024]:
            out += content
        if len(out) >= limit:
            break
    return bytes(out[:limit])
