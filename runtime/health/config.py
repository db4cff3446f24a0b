"""`[health]`: which sources an agent reads and how verdicts are drawn. Pure.

`[health.xid]` overrides the catalogue, for example `"63" = "ignore"` or `"94" = "drain"`;
`[health.gpus]` pins GPUs by UUID or board serial number, for example `"GPU-..." = "rack-0/3"`;
`[health.switches]` says which rack an NVSwitch is of, `"0000:c2:00.0" = "rack-0"`, where a host has
more than one.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

import msgspec

from runtime.config_errors import require
from runtime.health.observation import normal_pci

SourceName = Literal["nvml", "kmsg", "journald", "kernel_log", "nvidia_smi", "prometheus"]
XidRuling = Literal["ignore", "suspect", "degraded", "drain", "fail"]


class VerdictConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How verdicts rise and fall.

    clear_s: a suspicion without anything new clears by itself after this long.
    settle_s: a cleared fault must stay clear for this long before the state falls (hysteresis).
    repeats, repeat_window_s: as many equal suspicions within the window mean drain it.
    flaps, flap_window_s: as often bad again within the window, and the GPU is quarantined, for
        quarantine_s, doubled each time up to quarantine_max_s.
    """

    clear_s: float = 600.0
    settle_s: float = 10.0
    repeats: int = 3
    repeat_window_s: float = 3600.0
    flaps: int = 3
    flap_window_s: float = 3600.0
    quarantine_s: float = 600.0
    quarantine_max_s: float = 86_400.0

    def __post_init__(self) -> None:
        for key in ("clear_s", "repeat_window_s", "flap_window_s", "quarantine_s"):
            require(getattr(self, key) > 0, key, getattr(self, key), "more than 0")
        require(self.settle_s >= 0, "settle_s", self.settle_s, "0 or more")
        for key in ("repeats", "flaps"):
            require(getattr(self, key) >= 2, key, getattr(self, key), "2 or more")
        require(
            self.quarantine_max_s >= self.quarantine_s,
            "quarantine_max_s",
            self.quarantine_max_s,
            f"quarantine_s ({self.quarantine_s}) or more",
        )


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sources of the agents, rulings on Xids, pinned GPUs, and the verdicts' thresholds.

    sources: without a word, NVML and /dev/kmsg on real devices, none on emulated ones.
    kernel_log: file for the source of that name. prometheus: where to scrape; only this machine
    unless the URL says otherwise. webhook_port: where other systems post what they know, 0 (off)
    or a port of webhook_host; beyond this machine only with COUNTERPOISE_WEBHOOK_TOKEN set.
    poll_s: seconds between polls. slow_ratio: a share of the step that is this many times that of
    its peers counts as slow.
    """

    sources: tuple[SourceName, ...] | None = None
    kernel_log: str = "/var/log/kern.log"
    prometheus: str = "http://127.0.0.1:9400/metrics"
    nvidia_smi: str = "nvidia-smi"
    webhook_host: str = "127.0.0.1"
    webhook_port: int = 0
    poll_s: float = 1.0
    slow_ratio: float = 1.15
    xid: dict[str, XidRuling] = {}
    gpus: dict[str, str] = {}
    switches: dict[str, str] = {}
    verdict: VerdictConfig = VerdictConfig()

    def __post_init__(self) -> None:
        named = self.sources or ()
        require(len(set(named)) == len(named), "sources", list(named), "no repeats")
        ok = 0 <= self.webhook_port <= 65_535
        require(ok, "webhook_port", self.webhook_port, "0 (off) to 65535")
        require(0.1 <= self.poll_s <= 3600, "poll_s", self.poll_s, "0.1 to 3600")
        require(1.02 <= self.slow_ratio <= 10, "slow_ratio", self.slow_ratio, "1.02 to 10")
        for code in self.xid:
            ok = code.isascii() and code.isdigit() and 1 <= int(code) <= 99_999
            require(ok, "xid", code, "Xid or SXid numbers in quotes, 1 to 99999")
        for name, gpu in self.gpus.items():
            rack, _, slot = gpu.rpartition("/")
            ok = bool(name) and bool(rack) and slot.isascii() and slot.isdigit()
            require(ok, f"gpus.{name}", gpu, "RACK/SLOT")
        for address, rack in self.switches.items():
            require(bool(normal_pci(address)), "switches", address, "PCI addresses in quotes")
            require(bool(rack), f"switches.{address}", rack, "the name of a rack")
        url = urlsplit(self.prometheus)
        ok = url.scheme in ("http", "https") and bool(url.hostname)
        require(ok, "prometheus", self.prometheus, "an http or https URL")
