"""Runs the configured sources of a host, each in a thread, and hands on what matters.

A missing source is told once and tried again later. Of snapshots only changes go on: a healthy GPU
is not news ten times a second.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from runtime.health.address_map import AddressMap
from runtime.health.catalogue import Catalogue, load_catalogue
from runtime.health.config import HealthConfig
from runtime.health.observation import Identity, Observation, normal_pci
from runtime.health.sources.feeds import FileFeed, JournaldFeed, KmsgFeed
from runtime.health.sources.kernel import KernelLogSource
from runtime.health.sources.nvml import NvmlSource
from runtime.health.sources.polled import PrometheusSource, SmiSource
from runtime.health.sources.port import HealthSource, SourceState
from runtime.health.sources.webhook import TOKEN_VARIABLE, WebhookSource

RETRY_S = 10.0
PROC_GPUS = Path("/proc/driver/nvidia/gpus")
_LOG = logging.getLogger(__name__)


class Watch:
    """The sources of one host.

    Args:
        sources: from `sources_of`, or a test's.
        addresses: maps what sources call a GPU to the run's ids.
        sink: gets every observation that is news, from any thread.
        poll_s: seconds between polls. kept: file that remembers the boards' slots, or None.
        on_state: gets every state of a source that is news, from any thread.
    """

    def __init__(
        self,
        sources: Sequence[HealthSource],
        *,
        addresses: AddressMap,
        sink: Callable[[Observation], None],
        poll_s: float,
        kept: Path | None = None,
        on_state: Callable[[SourceState], None] = lambda _state: None,
    ) -> None:
        self._on_state = on_state
        self._sources = list(sources)
        self._addresses = addresses
        self._sink = sink
        self._poll_s = poll_s
        self._kept = kept
        self._remembered = addresses.remember()
        self._lock = threading.Lock()
        self._told: dict[tuple[str, str], tuple[object, ...]] = {}
        self._states: dict[str, SourceState] = {}
        self._ecc: dict[str, int] = {}

    def states(self) -> list[SourceState]:
        """Every source with its state."""
        return [source.state for source in self._sources]

    def start(self, stop: threading.Event) -> list[threading.Thread]:
        """One thread a source, until `stop`."""
        threads = [
            threading.Thread(
                target=self._follow, args=(source, stop), name=f"health-{source.name}", daemon=True
            )
            for source in self._sources
        ]
        for thread in threads:
            thread.start()
        return threads

    def _follow(self, source: HealthSource, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                if source.open().status == "watching":
                    self._poll_while_it_works(source, stop)
                self._note(source.state)
                stop.wait(RETRY_S if source.state.status != "failing" else 1.0)
        finally:
            source.close()

    def _poll_while_it_works(self, source: HealthSource, stop: threading.Event) -> None:
        while not stop.is_set():
            began = time.monotonic()
            found = source.poll(min(self._poll_s, 0.5))
            if source.state.status != "watching":
                return
            self._note(source.state)
            self.take(source, found)
            if not source.waits:
                stop.wait(max(0.0, self._poll_s - (time.monotonic() - began)))

    def take(self, source: HealthSource, found: Sequence[Observation]) -> None:
        """Place observations and hand on those that are news."""
        with self._lock:
            identities, complete = source.identities()
            self._addresses.learn(identities, complete=complete)
            self._remember()
            placed = [self._addresses.placed(each) for each in found]
            news = [each for each in placed if self._is_news(each)]
            self._ecc |= {
                each.gpu: each.ecc for each in placed if each.gpu and each.ecc is not None
            }
        for each in news:
            self._sink(each)

    def ecc(self) -> dict[str, int]:
        """GPU -> uncorrected ECC errors as a source counted them last; those that none knows are
        left out."""
        with self._lock:
            return dict(self._ecc)

    def forget(self, gpus: Collection[str]) -> None:
        """What sources last said of these GPUs is news again when they next say it."""
        with self._lock:
            for key in [key for key in self._told if key[1] in gpus]:
                del self._told[key]

    def _remember(self) -> None:
        """Write down who sits where, when that has changed."""
        boards = self._addresses.remember()
        if self._kept is None or boards == self._remembered:
            return
        self._remembered = boards
        fresh = self._kept.with_suffix(".new")
        try:
            fresh.write_bytes(msgspec.json.encode(boards))
            fresh.replace(self._kept)
        except OSError as error:
            _LOG.warning("%s cannot be written: %s", self._kept, error)

    def _is_news(self, seen: Observation) -> bool:
        if not seen.snapshot:
            return True
        if seen.gpu is None:
            return False
        key = (seen.source, seen.gpu)
        word = (seen.code, seen.subcode, seen.verdict, seen.count)
        is_new = self._told.get(key, (None, None, "healthy", 1)) != word
        self._told[key] = word
        return is_new

    def _note(self, state: SourceState) -> None:
        with self._lock:
            before = self._states.get(state.name)
            self._states[state.name] = state
        if before != state:
            level = logging.INFO if state.status == "watching" else logging.WARNING
            _LOG.log(level, "health source %s: %s %s", state.name, state.status, state.reason)
            self._on_state(state)


def open_watch(
    config: HealthConfig,
    gpus: Sequence[str],
    sink: Callable[[Observation], None],
    home: Path | None,
    *,
    real: bool,
    on_state: Callable[[SourceState], None] = lambda _state: None,
) -> Watch:
    """The watch of an agent's host.

    home: where to remember which board sits in which slot, over restarts. real: the devices are, so
    that without a word in the config NVML and the kernel log are watched; else nothing is, but for
    a webhook that has a port.
    """
    names = config.sources
    if names is None:
        names = ("nvml", "kmsg") if real else ()
    config = msgspec.structs.replace(config, sources=names)
    kept = home / "boards.json" if home is not None else None
    addresses = AddressMap(gpus, config.gpus, _recalled(kept))
    if names:
        addresses.learn(proc_identities())
    sources = sources_of(config) if names else []
    if config.webhook_port:
        webhook = WebhookSource(
            (config.webhook_host, config.webhook_port),
            load_catalogue(config.xid),
            locate=addresses.locate,
            gpus=gpus,
            token=os.environ.get(TOKEN_VARIABLE, "").strip(),
        )
        sources.append(webhook)
    return Watch(
        sources,
        addresses=addresses,
        sink=sink,
        poll_s=config.poll_s,
        kept=kept,
        on_state=on_state,
    )


def _recalled(kept: Path | None) -> dict[str, str]:
    if kept is None or not kept.is_file():
        return {}
    try:
        return msgspec.json.decode(kept.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        _LOG.warning("%s is not used: %s", kept, error)
        return {}


def sources_of(config: HealthConfig, catalogue: Catalogue | None = None) -> list[HealthSource]:
    """The sources that the config names."""
    rulings = catalogue or load_catalogue(config.xid)
    made: dict[str, Callable[[], HealthSource]] = {
        "nvml": lambda: NvmlSource(rulings),
        "kmsg": lambda: KernelLogSource(KmsgFeed(), rulings),
        "journald": lambda: KernelLogSource(JournaldFeed(), rulings),
        "kernel_log": lambda: KernelLogSource(FileFeed(Path(config.kernel_log)), rulings),
        "nvidia_smi": lambda: SmiSource(config.nvidia_smi, rulings),
        "prometheus": lambda: PrometheusSource(config.prometheus, rulings),
    }
    return [made[name]() for name in config.sources or ()]


def proc_identities(root: Path = PROC_GPUS) -> list[Identity]:
    """Who sits where, by the driver's own files; [] without a driver."""
    found = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            text = (folder / "information").read_text("utf-8", "replace")
        except OSError:
            continue
        fields = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in text.splitlines())
        }
        found.append(Identity(pci=normal_pci(folder.name), uuid=fields.get("GPU UUID", "")))
    return found
