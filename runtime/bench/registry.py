"""Every benchmark by name; the order is the order of `counterpoise bench --list`."""

from __future__ import annotations

from runtime.bench import dashboard, health, parity, recovery, startup
from runtime.bench.benchmark import Benchmark

BENCHMARKS: dict[str, Benchmark] = {
    each.name: each
    for each in (
        parity.BENCHMARK,
        recovery.BENCHMARK,
        startup.BENCHMARK,
        health.BENCHMARK,
        dashboard.BENCHMARK,
    )
}
