"""Dashboard: what twenty viewers of a run of 1,152 GPUs cost, and how long each of them waits.

The real dashboard as its own process over a store of its own; the viewers speak its protocol
(`runtime.bench.session`), so that the machine's time goes to what is measured. How long a person
waits for another page is told by a real browser where there is one.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.bench.benchmark import Benchmark, Figures, Say, Target
from runtime.bench.big_run import BigRun
from runtime.bench.page import open_browser, wait_until_rendered
from runtime.bench.session import Session, Ticks
from runtime.control.supervisor import dashboard_answers, free_port
from runtime.errors import CounterpoiseError
from storage.live.embedded import EmbeddedServer
from storage.live.redis_store import RedisStore
from storage.settings import DATABASE_VARIABLE, HOME_VARIABLE, REDIS_VARIABLE, Settings

if TYPE_CHECKING:
    from playwright.sync_api import Page

RUN = "bench"
NUM_RACKS, NUM_SLOTS = 16, 72
NUM_SESSIONS = 20
# What viewers have open, in turn
PAGES = ("racks", "", "racks", "replicas")
SWITCHES = ("replicas", "racks", "reconfigure", "racks")
WARM_UP_S, MEASURE_S = 8.0, 20.0
# The long variant: what a process takes in its first minutes (caches, allocator) is no growth
LONG_S, SETTLED_AFTER_S, LOOK_EVERY_S = 1800.0, 300.0, 60.0
START_DEADLINE_S = 30.0


def measure(say: Say) -> dict[str, Any]:
    return _measured(say, MEASURE_S)


def measure_full(say: Say) -> dict[str, Any]:
    """The same for half an hour, to see whether memory grows."""
    return _measured(say, LONG_S)


def _measured(say: Say, measure_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="counterpoise-") as folder:
        environment = {**os.environ, HOME_VARIABLE: str(Path(folder) / "home")}
        for name in (REDIS_VARIABLE, DATABASE_VARIABLE, "PYTHONDONTWRITEBYTECODE"):
            environment.pop(name, None)
        settings = Settings.from_env(environment)
        with EmbeddedServer.from_settings(settings) as server:
            store = RedisStore.for_service(server.url)
            run = BigRun(store, run=RUN, num_racks=NUM_RACKS, num_slots=NUM_SLOTS)
            run.start()
            try:
                return _measure(run, environment, Path(folder), say, measure_s)
            finally:
                run.stop()
                store.close()


def _measure(
    run: BigRun, environment: dict[str, str], folder: Path, say: Say, measure_s: float
) -> dict[str, Any]:
    port = free_port()
    with (folder / "dashboard.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "runtime.cli", "app", "--port", str(port)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _await_answer(process, port, folder / "dashboard.log")
        say(f"{NUM_SESSIONS} sessions look at {run.num_gpus} GPUs for {measure_s:.0f} s")
        figures = asyncio.run(_load(f"127.0.0.1:{port}", process.pid, say, measure_s))
        with open_browser() as page:
            if page is not None:
                figures["page_switch_ms"] = _browser_switch_ms(page, port)
                figures["page_switch_measured_by"] = "browser"
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return {"sessions": NUM_SESSIONS, "gpus": run.num_gpus, **figures}


def _await_answer(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while not dashboard_answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            words = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise CounterpoiseError(f"the dashboard did not come up:\n{words}")
        time.sleep(0.05)


async def _load(address: str, pid: int, say: Say, measure_s: float) -> dict[str, Any]:
    """Let the sessions look on; figures of the time after the warm-up."""
    sessions = [Session(address, f"run={RUN}") for _ in range(NUM_SESSIONS)]
    for number, session in enumerate(sessions):
        await session.open(PAGES[number % len(PAGES)])
    stop, ticks, phases = asyncio.Event(), Ticks(), random.Random(0)
    looking = [
        asyncio.create_task(one.tick_until(stop, ticks, phases.random())) for one in sessions
    ]
    await asyncio.sleep(WARM_UP_S)
    ticks.clear()
    rss_mb, cpu_s, began = [_rss_mb(pid)], _cpu_s(pid), time.monotonic()
    watching = asyncio.create_task(_watch_memory(pid, rss_mb, say))
    switcher = Session(address, f"run={RUN}")
    await switcher.open("")
    switches = []
    for page in SWITCHES * 2:
        await asyncio.sleep(measure_s / (2 * len(SWITCHES) + 1))
        switches.append(await switcher.switch(page))
    await asyncio.sleep(max(0.0, measure_s - (time.monotonic() - began)))
    busy = (_cpu_s(pid) - cpu_s) / (time.monotonic() - began)
    watching.cancel()
    rss_mb.append(_rss_mb(pid))
    stop.set()
    await asyncio.gather(*looking)
    for session in (*sessions, switcher):
        await session.close()
    live_parts = sum(len(one.intervals) for one in sessions)
    return {
        "ticks": len(ticks.seconds),
        "live_parts": live_parts,
        "tick_p50_ms": _percentile_ms(ticks.seconds, 0.5),
        "tick_p95_ms": _percentile_ms(ticks.seconds, 0.95),
        "bytes_per_tick": round(sum(ticks.num_bytes) / max(1, len(ticks.num_bytes))),
        "core_percent": round(100 * busy, 1),
        "rss_mb": round(rss_mb[-1]),
        "rss_growth_mb": round(rss_mb[-1] - _settled(rss_mb), 1),
        "rss_mb_by_minute": [round(one, 1) for one in rss_mb],
        "page_switch_ms": _percentile_ms(switches, 0.5),
        "page_switch_measured_by": "session",
    }


async def _watch_memory(pid: int, rss_mb: list[float], say: Say) -> None:
    """Note the resident memory once a minute, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        rss_mb.append(_rss_mb(pid))
        say(f"minute {len(rss_mb) - 1}: {rss_mb[-1]:.1f} MB resident")


def _settled(rss_mb: Sequence[float]) -> float:
    """What growth is counted from: what was read after `SETTLED_AFTER_S`, of a short run first."""
    settled = int(SETTLED_AFTER_S / LOOK_EVERY_S)
    return rss_mb[settled] if len(rss_mb) > settled + 1 else rss_mb[0]


def _browser_switch_ms(page: Page, port: int) -> float:
    """Median time from a click in the navigation until the other page's own part is drawn."""
    wait_until_rendered(page, f"http://127.0.0.1:{port}/racks?run={RUN}", START_DEADLINE_S)
    page.locator("canvas").wait_for(state="visible")
    took = []
    for _ in range(4):
        for name, sign in (("Replicas", "table[aria-label=Pace]"), ("Racks", "canvas")):
            began = time.monotonic()
            page.get_by_role("link", name=name, exact=True).click()
            page.locator(sign).first.wait_for(state="visible")
            took.append(time.monotonic() - began)
    return _percentile_ms(took, 0.5)


def _percentile_ms(seconds: Sequence[float], share: float) -> float:
    ordered = sorted(seconds)
    if not ordered:
        return 0.0
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def targets(figures: Figures) -> list[Target]:
    flat = Target(figure="rss_growth_mb", at_most=16.0, why="memory is flat after five minutes")
    return [
        *([flat] if len(figures.get("rss_mb_by_minute", ())) > 10 else []),
        Target(figure="tick_p95_ms", at_most=60.0, why="a tick is there before it is missed"),
        Target(figure="core_percent", at_most=50.0, why="half a core for 20 viewers"),
        Target(figure="page_switch_ms", at_most=300.0, why="another page feels immediate"),
    ]


BENCHMARK = Benchmark(
    name="dashboard",
    summary="20 viewers of a run of 1,152 GPUs at 1 Hz: tick time, bytes, memory, page switches",
    measure=measure,
    targets=targets,
    measure_full=measure_full,
)
