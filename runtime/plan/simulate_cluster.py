"""A job of tens of thousands of GPUs under failures, sampled: what cluster planners ask.

Setting of the NTP paper (arXiv 2504.06095, section 5): 32,768 GPUs, scale-up domains of 32, eight
domains a replica, local batch 8, tensor parallelism 32 that falls back to 30 and 28. Domains with
failures are packed into as few replicas as possible. Vectorised: a sample is a row. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.power.curve import perf

Counts = npt.NDArray[np.int64]
# Llama 3 (arXiv 2407.21783, table 5): 419 interruptions in 54 days on 16,384 GPUs.
INTERRUPTIONS_PER_GPU_DAY = 419 / 54 / 16_384
HARDWARE_SHARE = 0.78
SOFTWARE_REPAIR_DAYS = 3 / 24
MAX_POWER = 1.3


@dataclass(frozen=True, kw_only=True)
class ClusterSetting:
    """The job. fallbacks: degrees below `domain` that a domain may train at.

    attention_share: of a layer's FLOPs; whole_heads: a slot holds whole query heads, so that
    attention is as slow as the slot with most of them.
    """

    num_gpus: int = 32_768
    domain: int = 32
    domains_per_replica: int = 8
    local_batch: int = 8
    fallbacks: tuple[int, ...] = (30, 28)
    heads: int = 128
    attention_share: float = 0.375
    whole_heads: bool = False

    @property
    def num_domains(self) -> int:
        return self.num_gpus // self.domain

    @property
    def num_replicas(self) -> int:
        return self.num_domains // self.domains_per_replica

    def step_ratio(self, degree: int) -> float:
        """Step time of a replica at `degree` over a whole one's, at the same local batch."""
        even = self.domain / degree
        if not self.whole_heads:
            return even
        heads = math.ceil(self.heads / degree) / (self.heads / self.domain)
        return self.attention_share * heads + (1.0 - self.attention_share) * even

    def samples(self, degree: int, *, boost: bool) -> int:
        """Samples of a step that a replica at `degree` does in a whole replica's time."""
        pace = perf(MAX_POWER) if boost else 1.0
        fits = math.floor(self.local_batch * pace / self.step_ratio(degree) + 1e-9)
        return min(self.local_batch, fits)


def failed_per_domain(
    setting: ClusterSetting, fraction: float, num_samples: int, seed: int, at_once: int = 1
) -> Counts:
    """Failed GPUs `(num_samples, num_domains)`, failures placed uniformly.

    at_once: neighbours that one failure takes (a divisor of the domain).
    """
    random = np.random.default_rng(seed)
    blocks = setting.num_gpus // at_once
    count = round(fraction * setting.num_gpus / at_once)
    per_domain = setting.domain // at_once
    out = np.zeros((num_samples, setting.num_domains), dtype=np.int64)
    for row in range(num_samples):
        domains = random.choice(blocks, size=count, replace=False) // per_domain
        out[row] = np.bincount(domains, minlength=setting.num_domains) * at_once
    return out


def drop_loss(setting: ClusterSetting, failed: Counts, *, packed: bool = True) -> float:
    """Mean share of the batch lost when every replica with a failure is dropped."""
    bad = failed > 0
    if packed:
        dropped = np.ceil(bad.sum(1) / setting.domains_per_replica)
    else:
        dropped = bad.reshape(len(bad), -1, setting.domains_per_replica).any(2).sum(1)
    return float(dropped.mean() / setting.num_replicas)


def _deficit(setting: ClusterSetting, failed: Counts, *, boost: bool) -> npt.NDArray[np.float64]:
    """Samples of a step that go missing, by row: a replica is as good as its worst domain."""
    lost = np.sort(failed, axis=1)[:, ::-1].reshape(len(failed), -1, setting.domains_per_replica)
    worst = lost.max(2)
    samples = np.zeros(worst.shape)
    for degree in sorted(setting.fallbacks):
        samples[setting.domain - worst >= degree] = setting.samples(degree, boost=boost)
    samples[worst == 0] = setting.local_batch
    missing: npt.NDArray[np.float64] = (setting.local_batch - samples).sum(1)
    return missing


def ntp_loss(setting: ClusterSetting, failed: Counts, *, boost: bool) -> float:
    """Mean share of the batch lost with nonuniform tensor parallelism."""
    whole = setting.num_replicas * setting.local_batch
    return float(_deficit(setting, failed, boost=boost).mean() / whole)


def spare_domains(setting: ClusterSetting, failed: Counts, how: str) -> Counts:
    """Spare domains that keep the batch whole, by sample row; how: "drop", "ntp" or "boost"."""
    size = setting.domains_per_replica
    if how == "drop":
        replicas = np.ceil((failed > 0).sum(1) / size)
    else:
        missing = _deficit(setting, failed, boost=how == "boost")
        replicas = np.ceil(missing / setting.local_batch)
    domains: Counts = (replicas * size).astype(np.int64)
    return domains


def availability(num_gpus: int, degree: int, fraction: float, num_samples: int, seed: int) -> float:
    """Mean share of domains of `degree` GPUs without a failure."""
    setting = ClusterSetting(num_gpus=num_gpus // degree * degree, domain=degree)
    return float((failed_per_domain(setting, fraction, num_samples, seed) == 0).mean())


def failed_over_time(
    num_gpus: int, days: float, repair_days: float, num_samples: int, seed: int
) -> Counts:
    """GPUs that are down, `(num_samples, hours)`: Poisson arrivals from a healthy start."""
    random = np.random.default_rng(seed)
    hours = round(days * 24)
    per_hour = INTERRUPTIONS_PER_GPU_DAY * num_gpus / 24
    down = np.zeros((num_samples, hours), dtype=np.int64)
    kinds = (
        (per_hour * HARDWARE_SHARE, round(repair_days * 24)),
        (per_hour * (1.0 - HARDWARE_SHARE), round(SOFTWARE_REPAIR_DAYS * 24)),
    )
    for rate, lasts in kinds:
        arrived = np.cumsum(random.poisson(rate, size=down.shape), axis=1)
        repaired = np.zeros_like(arrived)
        repaired[:, lasts:] = arrived[:, :-lasts]
        down += arrived - repaired
    return down
