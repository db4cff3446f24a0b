"""What an Xid means: NVIDIA's catalogue as a package file, with the config's overrides. Pure.

The file is this project's own; its facts are those of NVIDIA's public catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple, cast

from runtime.errors import CounterpoiseError
from runtime.health.config import XidRuling
from storage.records import GPU_STATES, GpuState

_RULINGS: dict[XidRuling, GpuState] = {
    "ignore": "healthy",
    "suspect": "suspect",
    "degraded": "degraded",
    "drain": "draining",
    "fail": "failed",
}


class CatalogueError(CounterpoiseError):
    """The package's own catalogue file is damaged."""


class XidEntry(NamedTuple):
    """One code. verdict: what one such event alone argues for; fixed: the config said so."""

    code: int
    mnemonic: str
    immediate: str
    investigatory: str
    verdict: GpuState
    fixed: bool = False


class Catalogue:
    """Rulings by Xid number."""

    def __init__(self, entries: Mapping[int, XidEntry], overrides: Mapping[str, XidRuling]) -> None:
        self._entries = dict(entries)
        for text, ruling in overrides.items():
            code = int(text)
            known = self._entries.get(code) or XidEntry(code, "", "", "", "suspect")
            self._entries[code] = known._replace(verdict=_RULINGS[ruling], fixed=True)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, code: int) -> bool:
        return code in self._entries

    def entry(self, code: int) -> XidEntry:
        """The ruling on `code`; one the catalogue does not know is suspect, no more."""
        return self._entries.get(code) or XidEntry(code, "", "UNKNOWN_XID", "", "suspect")


def load_catalogue(overrides: Mapping[str, XidRuling] | None = None) -> Catalogue:
    """The package's catalogue with the config's overrides.

    Raises:
        CatalogueError: the package file is damaged.
    """
    text = resources.files("runtime.health").joinpath("xid_catalogue.tsv").read_text("utf-8")
    return Catalogue(parse_catalogue(text), overrides or {})


def parse_catalogue(text: str) -> dict[int, XidEntry]:
    """Entries of a catalogue file by code.

    Raises:
        CatalogueError: a line that is not code, mnemonic, two actions and a verdict.
    """
    entries: dict[int, XidEntry] = {}
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    for line in lines[1:]:
        fields = line.split("\t")
        if len(fields) != 5 or not fields[0].isdigit() or fields[4] not in GPU_STATES:
            raise CatalogueError(f"xid_catalogue.tsv: cannot read {line!r}")
        code, mnemonic, immediate, investigatory, verdict = fields
        entries[int(code)] = XidEntry(
            int(code),
            mnemonic,
            "" if immediate == "-" else immediate,
            "" if investigatory == "-" else investigatory,
            cast(GpuState, verdict),
        )
    return entries
