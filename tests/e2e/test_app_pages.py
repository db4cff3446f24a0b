"""The pages in a real browser, on a real Valkey and SQLite, fed by a scripted run.

One dashboard serves all; every test has a run of its own and names it in the address.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import redis
from playwright.sync_api import Browser, Page, expect

from storage.live.memory import MemoryStore
from storage.records import DecisionMade
from tests.support import services
from tests.support.dashboard import Dashboard
from tests.support.feeder import Feeder
from tests.support.pages import (
    DEADLINE_MS,
    DESKTOP,
    PHONE,
    WALL,
    await_ticks,
    confirm,
    dialog,
    record,
    visit,
    watch_console,
)

# Page, and what more is in the address
VIEWS = (
    ("", ""), ("overview", ""), ("racks", ""), ("racks", "&gpu=r1/3"), ("replicas", ""),
    ("replicas", "&replica=1"), ("power", ""), ("reconfigure", ""), ("incidents", ""),
    ("history", ""), ("history", "&compare={run},{past}"), ("history", "&audit"),
)  # fmt: skip


@pytest.fixture
def page(console_page: Page) -> Page:
    return console_page


def test_nothing_runs_teaches_three_commands(
    page: Page, server: services.RedisServer, tmp_path: Path
) -> None:
    client = redis.Redis.from_url(server.url)
    client.flushall()
    client.close()
    empty = Dashboard(tmp_path, server.url)
    empty.start()
    try:
        page.goto(empty.url)
        for command in ("./run up", "counterpoise train --config run.toml", "counterpoise --help"):
            expect(page.get_by_text(command)).to_be_visible()
        page.goto(f"{empty.url}/history")
        expect(page.get_by_text("There is no history yet")).to_be_visible()
        page.goto(f"{empty.url}/incidents")
        expect(page.get_by_text("No run is known here")).to_be_visible()
        # Or the page would look for the server that ends now, and say so on its console
        page.goto("about:blank")
    finally:
        empty.kill()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_phone_desktop_and_wall(
    browser: Browser, dashboard: Dashboard, feeder: Feeder, scheme: str
) -> None:
    feeder.fault("r1/3", "kill")
    past = Feeder(MemoryStore(), run=f"{feeder.run}-past", name="past", prefill=50)
    past.begin()
    past.end()
    record(dashboard, feeder, past)
    context = browser.new_context(viewport=PHONE, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    errors = watch_console(page)
    for path, more in VIEWS:
        visit(page, dashboard, path, feeder, more.format(run=feeder.run, past=past.run))
        for size in (PHONE, DESKTOP, WALL):
            page.set_viewport_size(size)  # type: ignore[arg-type]
            page.wait_for_function(
                "() => { const main = document.querySelector('[data-testid=stMain]');"
                " return main.scrollWidth <= main.clientWidth + 1; }",
                timeout=DEADLINE_MS,
            )
        expect(page.locator(".emulated")).to_be_visible()
        expect(page.locator("[data-testid=stException]")).to_have_count(0)
        page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    context.close()
    assert errors == []


def test_zoom_survives_thirty_ticks(page: Page, dashboard: Dashboard, feeder: Feeder) -> None:
    visit(page, dashboard, "", feeder)
    expect(page.locator(".tile .value").first).to_be_visible()
    chart = page.locator(".cp-chart").first
    expect(chart.locator(".nsewdrag").first).to_be_visible()
    box = chart.locator(".nsewdrag").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.3)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.8, steps=5)
    page.mouse.up()
    look = "node => [Number(node.dataset.draws), ...node.layout.xaxis.range]"
    draws, *zoomed = chart.evaluate(look)
    assert zoomed[1] - zoomed[0] < 40
    services.wait_until(lambda: chart.evaluate(look)[0] >= draws + 30, 90.0, "thirty draws")
    assert chart.evaluate(look)[1:] == zoomed


def test_a_gpu_is_lost_and_the_replica_shrunk(
    page: Page, dashboard: Dashboard, feeder: Feeder
) -> None:
    visit(page, dashboard, "racks", feeder, "&gpu=r1/3")
    page.get_by_role("button", name="Inject fault").click()
    dialog(page).get_by_label("Type r1/3 to confirm").fill("r1/3")
    confirm(page, "Inject")
    expect(page.locator(".legend").first).to_contain_text("failed 1")
    page.get_by_role("link", name="Overview").click()
    expect(page.locator(".chip", has_text="running degraded")).to_be_visible()
    page.get_by_role("button", name="Look and decide").click()
    expect(page).to_have_url(re.compile(r"/reconfigure\?.*proposal=p"))

    # A dialog and what was typed into it survive the ticks; a reason is required
    page.get_by_role("button", name="Reject…").click()
    expect(dialog(page).get_by_role("button", name="Cancel")).to_be_focused()
    dialog(page).get_by_role("button", name="Reject").click()
    expect(dialog(page)).to_contain_text("A reason is required")
    dialog(page).get_by_role("textbox").fill("not now")
    await_ticks(page, 3)
    expect(dialog(page).get_by_role("textbox")).to_have_value("not now")
    dialog(page).get_by_role("button", name="Cancel").click()
    expect(dialog(page)).to_have_count(0)

    # A double click counts once
    page.get_by_role("button", name="Approve…").click()
    expect(dialog(page).get_by_role("button", name="Cancel")).to_be_focused()
    confirm(page, "Approve", clicks=2)
    expect(page.locator(".chip", has_text="applied, verified by the runtime")).to_be_visible()
    expect(page.get_by_text("Actual, measured over 4 steps")).to_be_visible()
    decisions = [one for one in feeder.entries if isinstance(one, DecisionMade)]
    assert [one.verdict for one in decisions] == ["approved"]
    assert decisions[0].via == "browser"
    assert decisions[0].who


def test_stale_cannot_be_approved_and_says_why(
    page: Page, dashboard: Dashboard, feeder: Feeder
) -> None:
    feeder.fault("r1/3", "kill")
    visit(page, dashboard, "reconfigure", feeder)
    page.get_by_role("button", name="Approve…").click()
    expect(dialog(page).get_by_role("button", name="Cancel")).to_be_focused()
    feeder.fault("r1/5", "kill")
    expect(page.get_by_text("a second GPU failed since").first).to_be_attached()
    dialog(page).get_by_role("button", name="Approve").click()
    expect(dialog(page)).to_contain_text("Refused, it is stale")
    expect(dialog(page).get_by_role("button", name="Approve")).to_be_disabled()
    dialog(page).get_by_text("Close", exact=True).click()
    expect(page.get_by_role("button", name="Approve…")).to_have_count(1)


def test_trigger_by_hand_makes_a_proposal(page: Page, dashboard: Dashboard, feeder: Feeder) -> None:
    visit(page, dashboard, "reconfigure", feeder)
    expect(page.get_by_text("Nothing waits for a decision")).to_be_visible()
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.get_by_role("button", name="Approve…")).to_be_visible()
    expect(page.get_by_text("a proposal was made")).to_be_visible()


def test_a_click_on_a_cell_shows_the_gpu(page: Page, dashboard: Dashboard, feeder: Feeder) -> None:
    visit(page, dashboard, "racks", feeder)
    canvas = page.locator("canvas")
    expect(canvas).to_be_visible()
    canvas.click(position={"x": 30, "y": 80})
    expect(page.get_by_role("heading", name="GPU r0/0")).to_be_visible()
    expect(page).to_have_url(re.compile(r"gpu=r0"))
    page.get_by_text("Temperature", exact=True).first.click()
    await_ticks(page, 2)
    expect(page.get_by_role("heading", name="GPU r0/0")).to_be_visible()
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="GPU r0/1")).to_be_visible()


def test_redis_dies_and_comes_back(
    page: Page, dashboard: Dashboard, feeder: Feeder, server: services.RedisServer
) -> None:
    visit(page, dashboard, "", feeder)
    server.kill()
    expect(page.get_by_text("the run goes on; reconnecting")).to_be_visible()
    expect(page.locator(".tile .value").first).to_be_visible()
    server.start()
    expect(page.locator(".banner")).to_have_count(0)
    await_ticks(page, 2)


def test_history_of_a_stopped_run_with_redis_away(
    page: Page, dashboard: Dashboard, feeder: Feeder, server: services.RedisServer
) -> None:
    feeder.fault("r1/3", "kill")
    time_of_decision = time.time()
    feeder.end()
    feeder._append(
        DecisionMade(
            seq=feeder._next(), at=time_of_decision, run=feeder.run, id="c1", proposal="p1",
            generation=2, verdict="rejected", option=None, who="ann", via="cli", reason="not now",
        )
    )  # fmt: skip
    record(dashboard, feeder)
    server.kill()
    try:
        page.goto(f"{dashboard.url}/history")
        page.get_by_role("table", name="Recorded runs").get_by_text(feeder.run).click()
        expect(page).to_have_url(re.compile(f"run={feeder.run}"))
        expect(page.locator(".sum")).to_contain_text("Sum of the buckets")
        words = page.locator(".sum").inner_text().rstrip(".")
        parts, wall = words.removeprefix("Sum of the buckets ").split(", wall time ")
        assert parts == wall
        expect(page.get_by_role("table", name="Decisions")).to_contain_text("ann")
        expect(page.get_by_role("table", name="Decisions")).to_contain_text("not now")
        expect(page.get_by_role("table", name="Events")).to_contain_text("GPU r1/3 failed")
        expect(page.locator(".cp-chart .main-svg").first).to_be_visible()
    finally:
        server.start()


def test_dashboard_dies_and_comes_back(
    browser: Browser, dashboard: Dashboard, feeder: Feeder
) -> None:
    context = browser.new_context(viewport=DESKTOP)  # type: ignore[arg-type]
    page = context.new_page()
    visit(page, dashboard, "", feeder)
    dashboard.kill()
    silent = page.get_by_text("The dashboard has not answered for")
    expect(silent).to_be_visible()
    dashboard.start()
    expect(silent).to_have_count(0, timeout=60_000)
    await_ticks(page, 2)
    context.close()
