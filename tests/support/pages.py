"""What browser tests of the dashboard have in common: sizes, waiting for ticks, dialogs."""

from __future__ import annotations

import time

import pytest
from playwright.sync_api import ConsoleMessage, Locator, Page, ViewportSize, expect

from storage.history.database import open_history
from storage.history.schema import upgrade
from storage.history.writer import HistoryWriter
from tests.support import services
from tests.support.dashboard import Dashboard
from tests.support.feeder import Feeder

DEADLINE_MS = 15_000
DESKTOP: ViewportSize = {"width": 1440, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
WALL: ViewportSize = {"width": 3840, "height": 2160}
# A deep link makes Streamlit ask for two files below the page that are only at the root
HARMLESS = ("the server responded with a status of 404",)

expect.set_options(timeout=DEADLINE_MS)


def watch_console(page: Page) -> list[str]:
    """Errors that the console reports from now on."""
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


def record(dashboard: Dashboard, *feeders: Feeder) -> None:
    """Put what scripted runs wrote so far into the dashboard's history."""
    engine = open_history(f"sqlite:///{dashboard.home}/history.db")
    upgrade(engine)
    for feeder in feeders:
        HistoryWriter(engine).write(feeder.run, list(feeder.entries), time.time())
    engine.dispose()


def step_of(page: Page) -> int:
    shown = page.locator(".strip .step b").inner_text()
    return int(shown.replace("\N{NARROW NO-BREAK SPACE}", ""))


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
        try:
            services.wait_until(
                lambda: dialog(page).count() == 0 or slow.count() > 0, 15.0, "an answer"
            )
        except TimeoutError:
            pytest.fail(f"the dialog stays open and says: {dialog(page).inner_text()}")
        if dialog(page).count() == 0:
            return
    pytest.fail("Redis was too slow three times")
