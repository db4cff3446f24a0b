"""A store that is killed under an open page is a state with words, and the page comes back by
itself."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from storage.history.database import open_history
from storage.history.schema import upgrade
from storage.history.writer import HistoryWriter
from tests.conftest import missing
from tests.support import services
from tests.support.dashboard import Dashboard
from tests.support.feeder import Feeder
from tests.support.pages import await_ticks, visit

PAGES = ("Overview", "Racks", "Replicas", "Power", "Reconfigure", "Incidents", "History")


@pytest.fixture
def page(console_page: Page) -> Page:
    return console_page


@pytest.fixture
def postgres() -> Iterator[services.PostgresServer]:
    try:
        with services.running_postgres() as server:
            yield server
    except services.MissingServiceError as error:
        missing(error)


@pytest.fixture
def on_postgres(
    postgres: services.PostgresServer,
    server: services.RedisServer,
    feeder: Feeder,
    tmp_path: Path,
) -> Iterator[Dashboard]:
    """A dashboard whose history is in PostgreSQL and knows the run, its incident included."""
    url = postgres.url.render_as_string(hide_password=False)
    feeder.fault("r1/3", "kill")
    engine = open_history(url)
    upgrade(engine)
    HistoryWriter(engine).write(feeder.run, list(feeder.entries), time.time())
    engine.dispose()
    running = Dashboard(tmp_path, server.url, {"COUNTERPOISE_DATABASE_URL": url})
    running.start()
    yield running
    running.kill()


def no_traceback(page: Page) -> None:
    expect(page.locator("[data-testid=stException]")).to_have_count(0)


@pytest.mark.postgres
def test_the_database_dies_under_history(
    page: Page, on_postgres: Dashboard, postgres: services.PostgresServer, feeder: Feeder
) -> None:
    visit(page, on_postgres, "history", feeder)
    runs = page.get_by_role("table", name="Recorded runs")
    expect(runs).to_contain_text(feeder.run)
    expect(page.locator(".sum")).to_contain_text("Sum of the buckets")
    postgres.stop(signal.SIGQUIT)
    # What is there already stays readable; what asks again says why it gets nothing
    page.get_by_role("textbox", name="Search runs").fill("r")
    page.get_by_role("textbox", name="Search runs").press("Enter")
    expect(page.get_by_text("History is not available")).to_be_visible()
    expect(page.get_by_text("tries again every few seconds")).to_be_visible()
    no_traceback(page)
    postgres.start()
    expect(runs).to_contain_text(feeder.run)
    expect(page.get_by_role("textbox", name="Search runs")).to_have_value("r")
    expect(page.get_by_text("History is not available")).to_have_count(0)
    page.goto("about:blank")


@pytest.mark.postgres
def test_the_database_dies_under_incidents(
    page: Page, on_postgres: Dashboard, postgres: services.PostgresServer, feeder: Feeder
) -> None:
    visit(page, on_postgres, "incidents", feeder)
    timeline = page.get_by_role("region", name="Timeline")
    expect(timeline).to_contain_text("failed")
    postgres.stop(signal.SIGQUIT)
    said = page.get_by_text("The history cannot be read now")
    expect(said).to_be_visible()
    expect(timeline).to_contain_text("failed")
    no_traceback(page)
    postgres.start()
    expect(said).to_have_count(0)
    expect(timeline).to_contain_text("failed")
    page.goto("about:blank")


def test_redis_dies_and_every_page_says_so(
    page: Page, dashboard: Dashboard, feeder: Feeder, server: services.RedisServer
) -> None:
    visit(page, dashboard, "", feeder)
    await_ticks(page, 1)
    server.kill()
    try:
        for name in PAGES:
            page.get_by_role("link", name=name, exact=True).click()
            expect(page.get_by_text("the run goes on; reconnecting")).to_be_visible()
            no_traceback(page)
    finally:
        server.start()
    for name in PAGES:
        page.get_by_role("link", name=name, exact=True).click()
        expect(page.locator(".banner")).to_have_count(0)
        no_traceback(page)
    page.get_by_role("link", name="Overview", exact=True).click()
    await_ticks(page, 2)
