"""The browser for end-to-end tests: one for the session, a fresh context for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import running_browser

WAIT_MS = 15_000
VIEWPORT = {"width": 1440, "height": 900}


@pytest.fixture(scope="session")
def browser(chromium: Path) -> Iterator[Browser]:
    """The running browser."""
    with running_browser(chromium) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page without cookies or history; every wait on it ends after `WAIT_MS`."""
    context = browser.new_context(viewport=VIEWPORT, color_scheme="light", reduced_motion="reduce")
    context.set_default_timeout(WAIT_MS)
    try:
        yield context.new_page()
    finally:
        context.close()
