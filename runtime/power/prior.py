"""What every cap was before we first touched it, kept in a small file until it stands again.

The file outlives a killed agent, so that the next one restores what was found, not a default. It is
written whole (temporary file, then rename) before the first cap is set.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

_LOG = logging.getLogger(__name__)


class PriorCaps(msgspec.Struct, frozen=True, kw_only=True):
    """at: epoch seconds of the first change. caps_w: GPU id -> watts found. uuids: GPU id -> device
    id, so that a cap never goes to another card in the same slot."""

    at: float
    caps_w: dict[str, float]
    uuids: dict[str, str] = {}


class PriorFile:
    """The file of one host."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> PriorCaps | None:
        """What is kept; None without a file, or with one that is no use (told in the log)."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=PriorCaps)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _LOG.warning("power caps before us are not known: %s: %s", self._path, error)
            return None

    def write(self, prior: PriorCaps) -> None:
        """Keep `prior`, durably: it must be on disk before a cap changes."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".new")
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(prior))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)

    def forget(self) -> None:
        """Everything stands as it was found."""
        self._path.unlink(missing_ok=True)
