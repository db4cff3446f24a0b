"""Clicks and seconds from opening the dashboard to an answer, on the real runtime.

Counts its own clicks. A person's reading and thinking are not in the seconds. Run with `-s` to see
the table that docs/measurements.md keeps.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from storage.history.database import open_history
from storage.history.schema import upgrade
from storage.history.writer import HistoryWriter
from storage.live.memory import MemoryStore
from tests.support.endpoints import HttpEndpoint, http_endpoint
from tests.support.feeder import Feeder
from tests.support.pages import DESKTOP
from tests.support.services import wait_until
from tests.support.up import Up

DEADLINE_MS = 60_000
GPU = "rack-0/3"
NUM_PAST = 12


@dataclass
class Person:
    """Somebody who has just opened the dashboard. answers: (question, clicks, seconds)."""

    page: Page
    began: float
    clicks: int = 0
    answers: list[tuple[str, int, float]] = field(default_factory=list)

    def click(self, what: Locator) -> None:
        what.click()
        self.clicks += 1

    def knows(self, question: str) -> None:
        self.answers.append((question, self.clicks, time.monotonic() - self.began))


@contextmanager
def opening(browser: Browser, url: str) -> Iterator[Person]:
    context = browser.new_context(viewport=DESKTOP)
    context.set_default_timeout(DEADLINE_MS)
    expect.set_options(timeout=DEADLINE_MS)
    page = context.new_page()
    person = Person(page, time.monotonic())
    page.goto(url)
    try:
        yield person
    finally:
        context.close()
        expect.set_options(timeout=15_000)


@pytest.fixture
def hook() -> Iterator[HttpEndpoint]:
    """Where the run's notices go."""
    with http_endpoint() as endpoint:
        yield endpoint


@pytest.fixture
def up(tmp_path: Path, hook: HttpEndpoint) -> Iterator[Up]:
    """A run on real workers, and a week of recorded ones beside it."""
    running = Up(tmp_path / "home", "--fresh")
    running.environment["COUNTERPOISE_NOTIFY_WEBHOOKS"] = hook.url()
    running.home.mkdir(mode=0o700)
    engine = open_history(f"sqlite:///{running.home}/history.db")
    upgrade(engine)
    for number in range(NUM_PAST):
        feeder = Feeder(MemoryStore(), run=f"past-{number}", name=f"past {number}", prefill=50)
        feeder.begin()
        feeder.end()
        HistoryWriter(engine).write(feeder.run, list(feeder.entries), time.time())
    engine.dispose()
    running.start()
    yield running
    running.kill_hard()


@pytest.mark.timeout(300)
def test_few_clicks_lead_to_each_answer(up: Up, browser: Browser, hook: HttpEndpoint) -> None:
    url = up.await_line(r"dashboard +(http://127\.0\.0\.1:\d+)").group(1)
    up.await_line(r"training +first step committed")
    answer = up.cli("fault", "kill", GPU)
    assert answer["ok"], answer
    up.await_line(r"proposal +p1 open")
    answers = [*_which_gpu_and_why(browser, url), *_shrink(browser, url), *_last_week(browser, url)]
    answer = up.cli("fault", "repair", GPU)
    assert answer["ok"], answer
    answers += _from_a_notice(browser, _told(hook, "p2")["url"])
    assert _told(hook, "p1")["url"].startswith(f"{url}/reconfigure?")
    metrics = up.await_line(r"metrics +(http\S+)").group(1)
    with urllib.request.urlopen(metrics, timeout=10) as reply:
        assert "counterpoise_notices_total" in reply.read().decode()
    for question, clicks, seconds in answers:
        sys.stdout.write(f"{question:52} {clicks} clicks {seconds:6.1f} s\n")
    clicks = {question: num for question, num, _ in answers}
    assert clicks == {
        "which GPU is bad and why": 0,
        "its evidence and what was done": 1,
        "a shrink is approved": 3,
        "the shrink is applied, verified by the runtime": 3,
        "last week's goodput": 3,
        "a proposal is approved, from the link in a notice": 2,
    }


def _which_gpu_and_why(browser: Browser, url: str) -> list[tuple[str, int, float]]:
    with opening(browser, url) as person:
        expect(person.page.locator(".verdict")).to_contain_text(f"{GPU} failed")
        incidents = person.page.get_by_role("table", name="Incidents")
        expect(incidents).to_contain_text(f"{GPU} failed: its worker ended by signal 9")
        person.knows("which GPU is bad and why")
        person.click(incidents.get_by_text(f"{GPU} failed"))
        timeline = person.page.get_by_role("region", name="Timeline")
        expect(timeline).to_contain_text("signal 9")
        expect(timeline).to_contain_text("proposed")
        person.knows("its evidence and what was done")
        return person.answers


def _shrink(browser: Browser, url: str) -> list[tuple[str, int, float]]:
    with opening(browser, url) as person:
        page = person.page
        person.click(page.get_by_role("button", name="Look and decide"))
        person.click(page.get_by_role("button", name="Approve…"))
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
        person.click(dialog.get_by_role("button", name="Approve", exact=True))
        expect(dialog).to_have_count(0)
        person.knows("a shrink is approved")
        expect(page.get_by_text("applied, verified by the runtime").first).to_be_visible()
        person.knows("the shrink is applied, verified by the runtime")
        return person.answers


def _told(hook: HttpEndpoint, proposal: str) -> dict[str, str]:
    """The notice that `proposal` opened."""

    def found() -> list[dict[str, str]]:
        sent = [json.loads(post.body) for post in list(hook.posts)]
        return [
            one for one in sent
            if (one["kind"], one["proposal"]) == ("proposal_opened", proposal)
        ]  # fmt: skip

    wait_until(lambda: bool(found()), 60.0, f"the notice of {proposal}")
    return found()[0]


def _from_a_notice(browser: Browser, url: str) -> list[tuple[str, int, float]]:
    with opening(browser, url) as person:
        person.click(person.page.get_by_role("button", name="Approve…"))
        dialog = person.page.get_by_role("dialog")
        expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
        person.click(dialog.get_by_role("button", name="Approve", exact=True))
        expect(dialog).to_have_count(0)
        person.knows("a proposal is approved, from the link in a notice")
        return person.answers


def _last_week(browser: Browser, url: str) -> list[tuple[str, int, float]]:
    with opening(browser, url) as person:
        page = person.page
        person.click(page.get_by_role("link", name="History", exact=True))
        person.click(page.get_by_role("combobox", name="Started"))
        person.click(page.get_by_role("option", name="last week"))
        runs = page.locator(".tile", has_text="all that match")
        expect(runs).to_contain_text(str(NUM_PAST + 1))
        expect(page.locator(".tile", has_text="Token goodput").first).to_contain_text("%")
        person.knows("last week's goodput")
        return person.answers
