"""The whole story in a real browser: a run loses a GPU, goes on, is steered and looked back at."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.dashboard import Dashboard
from tests.support.services import wait_until
from tests.support.up import Up

DEADLINE_MS = 45_000
GPU = "rack-0/3"


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    running = Up(tmp_path / "home", "--fresh")
    yield running
    running.kill_hard()


@pytest.mark.timeout(400)
def test_a_run_loses_a_gpu_and_is_steered_from_the_browser(
    up: Up, page: Page, tmp_path: Path
) -> None:
    page.set_default_timeout(DEADLINE_MS)
    expect.set_options(timeout=DEADLINE_MS)
    up.start()
    url = up.await_line(r"dashboard +(http://127\.0\.0\.1:\d+)").group(1)
    up.await_line(r"training +first step committed")
    _healthy_run_is_shown(page, url)
    workers = _worker_pids(up)
    assert len(workers) == 16

    os.kill(workers[GPU], signal.SIGKILL)
    _loss_is_shown_and_proposal_appears(page)
    assert _others_carry_the_whole_batch(up)

    _approve(page)
    _await_replica(up, mode="training", degree=7)
    _applied_with_actual_beside_predicted(page)

    page.goto(f"{url}/reconfigure")
    answer = up.cli("fault", "repair", GPU)
    assert answer["ok"], answer
    _approve(page)
    _await_replica(up, mode="training", degree=8)

    _pause_and_resume(page, up)

    survivors = {gpu: pid for gpu, pid in _worker_pids(up).items() if gpu != GPU}
    assert survivors == {gpu: pid for gpu, pid in workers.items() if gpu != GPU}
    run = up.cli("status")["run"]
    assert up.interrupt() == 0
    wait_until(lambda: not up.processes(), 10.0, f"an end of {up.processes()}")

    _history_tells_it(page, up, run)


def _healthy_run_is_shown(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.locator(".strip .name")).to_have_text("demo")
    expect(page.get_by_text("emulated").first).to_be_visible()
    for tile in ("Loss", "Throughput", "Time goodput", "Token goodput"):
        expect(page.get_by_text(tile, exact=True).first).to_be_visible()
    expect(page.get_by_text(re.compile(r"8 of 8 slots")).nth(1)).to_be_visible()
    expect(page.locator(".cp-chart .main-svg").first).to_be_visible()
    wait_until(lambda: _shown_step(page) >= 2, 60.0, "steps on the page")


def _shown_step(page: Page) -> int:
    return int("0" + re.sub(r"\D", "", page.locator(".strip .step b").inner_text()))


def _loss_is_shown_and_proposal_appears(page: Page) -> None:
    expect(page.get_by_text("left out, 0 samples")).to_be_visible()
    expect(page.get_by_text(f"{GPU} failed").first).to_be_visible()
    page.get_by_role("button", name="Look and decide").click()
    expect(page.get_by_role("button", name="Approve…")).to_be_visible()
    expect(page.get_by_text("Carry on without replica 0").first).to_be_visible()
    expect(page.get_by_text(re.compile("expires in"))).to_be_visible()


def _others_carry_the_whole_batch(up: Up) -> bool:
    replicas = up.cli("status")["replicas"]
    return bool(replicas[1]["num_samples"] == 16 and replicas[0]["num_samples"] == 0)


def _approve(page: Page) -> None:
    page.get_by_role("button", name="Approve…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    dialog.get_by_role("button", name="Approve", exact=True).click()
    expect(dialog).to_have_count(0)


def _applied_with_actual_beside_predicted(page: Page) -> None:
    applied = page.locator(".chip", has_text="applied, verified by the runtime")
    expect(applied.first).to_be_visible()
    expect(page.get_by_text(re.compile("Actual, measured over")).first).to_be_visible()


def _await_replica(up: Up, *, mode: str, degree: int) -> None:
    def there() -> bool:
        state = up.cli("status")
        replica = state["replicas"][0]
        return bool(
            replica["mode"] == mode
            and len(replica["live"]) == degree
            and state["status"] == "running"
        )

    wait_until(there, 60.0, f"replica 0 {mode} with {degree} slots")


def _pause_and_resume(page: Page, up: Up) -> None:
    page.get_by_role("button", name="Pause…").click()
    page.get_by_role("dialog").get_by_role("textbox").fill("inspection")
    page.get_by_role("dialog").get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator(".chip", has_text="paused").first).to_be_visible()
    expect(page.get_by_text(re.compile("paused by .*: inspection")).first).to_be_visible()
    stood_at = up.cli("status")["step"]
    answer = up.cli("resume")
    assert answer["ok"], answer
    wait_until(lambda: up.cli("status")["step"] >= stood_at + 2, 60.0, "steps after the pause")


def _worker_pids(up: Up) -> dict[str, int]:
    """GPU id -> pid, from what the controller remembers."""
    import msgspec

    found: dict[str, int] = {}

    def read() -> bool:
        memory: dict[str, Any] = msgspec.json.decode(
            next((up.home / "runs").glob("*/memory.json")).read_bytes()
        )
        found.update(
            {gpu: seen["pid"] for gpu, seen in memory["gpus"].items() if seen["status"] == "alive"}
        )
        return len(found) == 16

    wait_until(read, 10.0, "16 living workers")
    return found


def _history_tells_it(page: Page, up: Up, run: str) -> None:
    """A day later: only the dashboard is started, Redis is gone."""
    dashboard = Dashboard(up.home, f"unix://{up.home}/redis.sock")
    dashboard.start()
    try:
        page.goto(f"{dashboard.url}/history?run={run}")
        expect(page.get_by_role("table", name="Decisions")).to_contain_text("browser")
        events = page.get_by_role("table", name="Events")
        expect(events).to_contain_text(f"{GPU} failed")
        expect(events).to_contain_text(f"{GPU} is back")
        expect(events).to_contain_text(": inspection. All processes live on")
        expect(page.locator(".cp-chart .main-svg").first).to_be_visible()
        words = page.locator(".sum").inner_text().rstrip(".")
        parts, wall = words.removeprefix("Sum of the buckets ").split(", wall time ")
        assert parts == wall
    finally:
        dashboard.kill()
    detail = up.cli("runs", run)
    assert [decision["verdict"] for decision in detail["decisions"]] == ["approved", "approved"]
    assert sum(detail["ledger"].values()) == pytest.approx(detail["run"]["wall_s"], abs=1e-3)
