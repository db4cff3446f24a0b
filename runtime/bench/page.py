"""When a person would see the dashboard: a real browser, opened beforehand, waits for the page.

Playwright is an extra of development and Chromium a program of the machine; without either there
is no browser and the caller measures less.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

# No sandbox: it refuses root, and the page is ours. The rest keeps the browser from calling home.
LAUNCH_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LAUNCH_DEADLINE_S = 20.0
# The header strip's step number (app/components/assets/strip.js).
STEP_NUMBER = ".step b"


@contextlib.contextmanager
def open_browser() -> Iterator[Page | None]:
    """An empty page of a headless browser; None where Playwright or Chromium is missing."""
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    executable = next((path for path in found if path), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        executable = None
    if executable is None:
        yield None
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable,
            args=list(LAUNCH_FLAGS),
            timeout=LAUNCH_DEADLINE_S * 1000,
            # A Ctrl-C is ours to handle: the run under test has to be ended first.
            handle_sigint=False,
        )
        try:
            yield browser.new_page()
        finally:
            browser.close()


def wait_until_rendered(page: Page, address: str, deadline_s: float) -> None:
    """Open the dashboard and return once the number of steps is on the page.

    Raises:
        playwright.sync_api.Error: it is not within `deadline_s`.
    """
    page.goto(address, timeout=deadline_s * 1000)
    page.locator(STEP_NUMBER).first.wait_for(state="visible", timeout=deadline_s * 1000)
