"""A real Chromium, driven by Playwright's synchronous API, that talks to this machine only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.support.services import MissingServiceError

# No sandbox: it refuses root, and the pages are ours. The rest keeps the browser from calling home.
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
LAUNCH_DEADLINE_S = 60.0


def find_chromium() -> Path:
    """The machine's browser.

    Raises:
        MissingServiceError: there is none.
    """
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return Path(found)
    raise MissingServiceError("no Chromium here (Debian: apt-get install chromium)")


@contextmanager
def running_browser(executable: Path) -> Iterator[Browser]:
    """A headless browser; open a context of your own for each test."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable,
            args=list(LAUNCH_FLAGS),
            headless=True,
            timeout=LAUNCH_DEADLINE_S * 1000,
        )
        try:
            yield browser
        finally:
            browser.close()
