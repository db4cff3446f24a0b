"""Sources that are asked now and then: `nvidia-smi -q -x`, and a Prometheus exporter."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

import msgspec

from runtime.health.catalogue import Catalogue
from runtime.health.observation import Identity, Observation, SourceKind, severity_of
from runtime.health.prometheus import ExpositionReader
from runtime.health.reading import Reading, judge
from runtime.health.smi_xml import SIZE_LIMIT, SmiError, SmiReader
from runtime.health.sources.port import SourceState

SMI_DEADLINE_S = 30.0
SCRAPE_DEADLINE_S = 5.0
_SCRAPE_BYTES = 32 << 20
_COMPLAINT_BYTES = 16_384


class SmiSource:
    """`nvidia-smi -q -x`, for hosts where NVML cannot be loaded here."""

    name = "nvidia_smi"
    waits = False

    def __init__(
        self, command: str, catalogue: Catalogue, clock: Callable[[], float] = time.time
    ) -> None:
        self.state = SourceState(self.name, "missing", "not opened yet")
        self._command = command
        self._catalogue = catalogue
        self._clock = clock
        self._identities: list[Identity] = []
        self._roll = _Roll("nvidia-smi")

    def open(self) -> SourceState:
        self.state = SourceState(self.name, "watching")
        return self.state

    def poll(self, timeout_s: float) -> Sequence[Observation]:
        try:
            done = subprocess.run(
                [self._command, "-q", "-x"],
                check=False,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=max(timeout_s, SMI_DEADLINE_S),
            )
            complaints = done.stderr[:_COMPLAINT_BYTES] + b"\n" if done.returncode else b""
            readings = SmiReader().read([complaints, done.stdout[: SIZE_LIMIT + 1]])
        except FileNotFoundError:
            self.state = SourceState(self.name, "missing", f"there is no {self._command} here")
            return []
        except PermissionError as error:
            self.state = SourceState(self.name, "denied", f"{self._command}: {error.strerror}")
            return []
        except (OSError, SmiError, subprocess.TimeoutExpired) as error:
            self.state = SourceState(self.name, "failing", str(error))
            return []
        self._identities = identities_of(readings)
        now, called = self._clock(), self._roll.call(readings)
        return [judge(each, "nvidia_smi", self._catalogue, at=now) for each in called]

    def identities(self) -> tuple[Sequence[Identity], bool]:
        return self._identities, True

    def close(self) -> None:
        pass


class PrometheusSource:
    """Scrapes an exporter. Its Xid gauge shows the last Xid for ever, its counts those of a window:
    only what is new or more is an event."""

    name = "prometheus"
    waits = False

    def __init__(
        self, url: str, catalogue: Catalogue, clock: Callable[[], float] = time.time
    ) -> None:
        self.state = SourceState(self.name, "missing", "not opened yet")
        self._url = url
        self._catalogue = catalogue
        self._clock = clock
        self._identities: list[Identity] = []
        self._xids: dict[str, dict[int, int]] = {}
        self._nvlink_base: dict[str, int] = {}
        self._roll = _Roll("the exporter")
        # No proxy: the exporter is on this machine, and so shall its numbers be.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def open(self) -> SourceState:
        self.state = SourceState(self.name, "watching")
        return self.state

    def poll(self, timeout_s: float) -> Sequence[Observation]:
        try:
            with self._opener.open(self._url, timeout=SCRAPE_DEADLINE_S) as answer:
                body = answer.read(_SCRAPE_BYTES)
        except urllib.error.HTTPError as error:
            status = "denied" if error.code in (401, 403) else "failing"
            self.state = SourceState(self.name, status, f"{self._url}: {error}")  # type: ignore[arg-type]
            error.close()
            return []
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            refused = isinstance(reason, ConnectionRefusedError)
            self.state = SourceState(
                self.name, "missing" if refused else "failing", f"{self._url}: {reason}"
            )
            return []
        readings = ExpositionReader().read(body.decode("utf-8", "replace").splitlines())
        if not readings:
            # It is just starting, or serves something else: that says nothing of any GPU.
            self.state = SourceState(self.name, "failing", f"{self._url}: names no GPU")
            return []
        self._identities = identities_of(readings)
        return self._observations(self._roll.call(readings))

    def identities(self) -> tuple[Sequence[Identity], bool]:
        return self._identities, True

    def close(self) -> None:
        pass

    def _observations(self, readings: Sequence[Reading]) -> list[Observation]:
        now, found = self._clock(), []
        for reading in readings:
            name, xids = reading.name or "", reading.xids
            reading.xids = {}
            if reading.nvlink_errors is not None:
                # Since boot; those of before we came are nobody's news.
                base = self._nvlink_base.setdefault(name, reading.nvlink_errors)
                reading.nvlink_errors = max(0, reading.nvlink_errors - base)
            found.append(judge(reading, "prometheus", self._catalogue, at=now))
            # What it showed before we came is of unknown age.
            before = self._xids.get(name, xids)
            self._xids[name] = xids
            for xid, times in sorted(xids.items()):
                more = times - before.get(xid, 0)
                if more > 0:
                    event = xid_event(reading, xid, "prometheus", self._catalogue, now)
                    found.append(msgspec.structs.replace(event, count=more))
        return found


class _Roll:
    """Who was listed once: a GPU that is no longer listed does not vanish, it is lost."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._known: dict[str, Reading] = {}

    def call(self, readings: Sequence[Reading]) -> list[Reading]:
        """The readings, and one for each GPU that is missing among them."""
        here = {name for each in readings for name in (each.uuid, each.pci) if name}
        gone = [
            Reading(
                pci=each.pci,
                uuid=each.uuid,
                serial=each.serial,
                lost=f"{self._who} no longer lists it",
            )
            for each in self._known.values()
            if not here & {each.uuid, each.pci}
        ]
        self._known |= {each.uuid or each.pci: each for each in readings if not each.lost}
        self._known.pop("", None)
        return [*readings, *gone]


def xid_event(
    reading: Reading, code: int, source: SourceKind, catalogue: Catalogue, at: float
) -> Observation:
    """An Xid that a source other than the kernel log told of."""
    entry = catalogue.entry(code)
    return Observation(
        source=source,
        gpu=reading.name,
        pci=reading.pci,
        code=code,
        severity=severity_of(entry.verdict),
        verdict=entry.verdict,
        action=entry.immediate,
        at=at,
        text=entry.mnemonic,
    )


def identities_of(readings: Sequence[Reading]) -> list[Identity]:
    return [Identity(pci=each.pci, uuid=each.uuid, serial=each.serial) for each in readings]
