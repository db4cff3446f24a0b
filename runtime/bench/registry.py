"""Every benchmark by name; the order is the order of `counterpoise bench --list`."""

from __future__ import annotations

from runtime.bench import (
    cluster,
    dashboard,
    goodput,
    health,
    history,
    parity,
    recovery,
    startup,
    sync,
    units,
)
from runtime.bench.benchmark import Benchmark
from runtime.bench.peers import comparison as peers

BENCHMARKS: dict[str, Benchmark] = {
    each.name: each
    for each in (
        parity.BENCHMARK,
        recovery.BENCHMARK,
        startup.BENCHMARK,
        health.BENCHMARK,
        dashboard.BENCHMARK,
        history.BENCHMARK,
        sync.BENCHMARK,
        units.BENCHMARK,
        peers.BENCHMARK,
        goodput.BENCHMARK,
        cluster.BENCHMARK,
    )
}
