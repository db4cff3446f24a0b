"""For end-to-end tests: one browser for the session and a fresh context for each test; one
dashboard over a real Valkey and SQLite, and a scripted run for each test that asks for one."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from storage.live.redis_store import RedisStore
from tests.conftest import missing
from tests.support import services
from tests.support.browser import running_browser
from tests.support.dashboard import Dashboard
from tests.support.feeder import Feeder
from tests.support.pages import DEADLINE_MS, DESKTOP, watch_console

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def browser(chromium: Path) -> Iterator[Browser]:
    """The running browser."""
    with running_browser(chromium) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page without cookies or history; every wait on it ends after `DEADLINE_MS`."""
    context = browser.new_context(viewport=DESKTOP, color_scheme="light", reduced_motion="reduce")
    context.set_default_timeout(DEADLINE_MS)
    try:
        yield context.new_page()
    finally:
        context.close()


@pytest.fixture
def console_page(page: Page) -> Iterator[Page]:
    """A page that fails its test when the console reports an error."""
    errors = watch_console(page)
    yield page
    page.context.close()
    assert errors == []


@pytest.fixture(scope="session")
def server() -> Iterator[services.RedisServer]:
    """The live store of all scripted runs."""
    try:
        with services.running_redis() as running:
            yield running
    except services.MissingServiceError as error:
        missing(error)


@pytest.fixture(scope="session")
def dashboard(server: services.RedisServer) -> Iterator[Dashboard]:
    """The dashboard of all scripted runs."""
    with tempfile.TemporaryDirectory(prefix="counterpoise-app-") as home:
        running = Dashboard(Path(home), server.url)
        running.start()
        try:
            yield running
        finally:
            running.kill()


@pytest.fixture
def feeder(server: services.RedisServer) -> Iterator[Feeder]:
    """A scripted run that trains on until the test ends."""
    number = next(_numbers)
    store = RedisStore.for_service(server.url)
    running = Feeder(store, run=f"run-{number}", name=f"demo {number}", prefill=60).start()
    yield running
    running.stop()
    store.close()
