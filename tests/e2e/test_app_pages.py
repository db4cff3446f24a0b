"""The pages in a real browser, on a real Valkey and SQLite, fed by a scripted run.

One dashboard serves the module; every test has a run of its own and names it in the address.
"""

from __future__ import annotations

import itertools
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect

from storage.history.database import open_history
from storage.history.schema import upgrade
from storage.history.writer import HistoryWriter
from storage.live.redis_store import RedisStore
from storage.records import DecisionMade
from tests.support import services
from tests.support.browser import running_browser
from tests.support.dashboard import Dashboard
from tests.support.feeder import Feeder

DEADLINE_MS = 15_000
PAGES = ("", "racks", "replicas", "reconfigure", "history")
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
# A deep link makes Streamlit ask for two files below the page that are only at the root
HARMLESS = ("the server responded with a status of 404",)

_numbers = itertools.count(1)
expect.set_options(timeout=DEADLINE_MS)


@pytest.fixture(scope="module")
def server() -> Iterator[services.RedisServer]:
    try:
        with services.running_redis() as running:
            yield running
    except services.MissingServiceError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def dashboard(server: services.RedisServer) -> Iterator[Dashboard]:
    with tempfile.TemporaryDirectory(prefix="counterpoise-app-") as home:
        running = Dashboard(Path(home), server.url)
        running.start()
        try:
            yield running
        finally:
            running.kill()


@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Browser]:
    with running_browser(chromium) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails its test when the console reports an error."""
    context = browser.new_context(viewport=DESKTOP, color_scheme="light")  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(DEADLINE_MS)
    errors = watch_console(page)
    yield page
    context.close()
    assert errors == []


@pytest.fixture
def feeder(server: services.RedisServer) -> Iterator[Feeder]:
    number = next(_numbers)
    store = RedisStore.for_service(server.url)
    running = Feeder(store, run=f"run-{number}", name=f"demo {number}", prefill=60).start()
    yield running
    running.stop()
    store.close()


def watch_console(page: Page) -> list[str]:
    errors: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error" and not any(one in message.text for one in HARMLESS):
            errors.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: errors.append(str(error)))
    return errors


def visit(page: Page, dashboard: Dashboard, path: str, feeder: Feeder, more: str = "") -> None:
    page.goto(f"{dashboard.url}/{path}?run={feeder.run}{more}")
    expect(page.locator(".strip .name")).to_have_text(feeder.name)


def step_of(page: Page) -> int:
    return int(page.locator(".strip .step b").inner_text().replace("\N{NARROW NO-BREAK SPACE}", ""))


def await_ticks(page: Page, count: int) -> None:
    """Wait until the header has shown `count` more steps."""
    goal = step_of(page) + count
    services.wait_until(lambda: step_of(page) >= goal, 30.0, f"{count} ticks")


def dialog(page: Page) -> Locator:
    return page.get_by_role("dialog")


def confirm(page: Page, label: str, *, clicks: int = 1) -> None:
    """Confirm in the dialog and see it close; again where a busy machine's Redis was too slow."""
    button = dialog(page).get_by_role("button", name=label, exact=True)
    slow = dialog(page).get_by_text("Not sent")
    for _ in range(3):
        button.click(click_count=clicks)
        services.wait_until(
            lambda: dialog(page).count() == 0 or slow.count() > 0, 15.0, "the answer to a click"
        )
        if dialog(page).count() == 0:
            return
    pytest.fail("Redis was too slow three times")


def test_nothing_runs_teaches_three_commands(
    page: Page, dashboard: Dashboard, server: services.RedisServer
) -> None:
    client = redis.Redis.from_url(server.url)
    client.flushall()
    client.close()
    page.goto(dashboard.url)
    for command in ("./run up", "counterpoise train --config run.toml", "counterpoise --help"):
        expect(page.get_by_text(command)).to_be_visible()
    page.goto(f"{dashboard.url}/history")
    expect(page.get_by_text("There is no history yet")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_desktop_and_phone(
    browser: Browser, dashboard: Dashboard, feeder: Feeder, scheme: str
) -> None:
    context = browser.new_context(viewport=PHONE, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    errors = watch_console(page)
    for path in PAGES:
        visit(page, dashboard, path, feeder)
        for size in (PHONE, DESKTOP):
            page.set_viewport_size(size)  # type: ignore[arg-type]
            page.wait_for_function(
                "() => { const main = document.querySelector('[data-testid=stMain]');"
                " return main.scrollWidth <= main.clientWidth + 1; }",
                timeout=DEADLINE_MS,
            )
        expect(page.locator(".emulated")).to_be_visible()
        page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    context.close()
    assert errors == []


def test_zoom_survives_ten_ticks(page: Page, dashboard: Dashboard, feeder: Feeder) -> None:
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
    services.wait_until(lambda: chart.evaluate(look)[0] >= draws + 10, 40.0, "ten draws")
    assert chart.evaluate(look)[1:] == zoomed


def test_a_gpu_is_lost_and_the_replica_shrunk(
    page: Page, dashboard: Dashboard, feeder: Feeder
) -> None:
    visit(page, dashboard, "racks", feeder, "&gpu=r1/3")
    page.get_by_role("button", name="Inject fault").click()
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
    engine = open_history(f"sqlite:///{dashboard.home}/history.db")
    upgrade(engine)
    HistoryWriter(engine).write(feeder.run, feeder.entries, time.time())
    engine.dispose()
    server.kill()
    try:
        page.goto(f"{dashboard.url}/history")
        page.get_by_text(f"{feeder.name} ({feeder.run})").click()
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
