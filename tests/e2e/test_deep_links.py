"""Every link that is handed out leads there in a browser that has never been here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect

from runtime.notify.news import RunNews, take
from runtime.notify.notice import Notice
from storage.live.memory import MemoryStore
from tests.support import services
from tests.support.dashboard import Dashboard
from tests.support.feeder import Feeder
from tests.support.pages import DESKTOP, record, watch_console


@contextmanager
def stranger(browser: Browser, url: str) -> Iterator[Page]:
    """A fresh browser that opens `url` and nothing else; a console error fails."""
    context = browser.new_context(viewport=DESKTOP, permissions=["clipboard-read"])
    page = context.new_page()
    errors = watch_console(page)
    page.goto(url)
    try:
        yield page
    finally:
        context.close()
    assert errors == []


@pytest.fixture
def notices(feeder: Feeder) -> dict[str, Notice]:
    """What would be told of a run that lost r1/3, by kind."""
    feeder.fault("r1/3", "kill")
    return {one.kind: one for one in take(RunNews(run=feeder.run), list(feeder.entries), 0.0)}


def test_what_is_told_leads_to_the_card_and_the_incident(
    browser: Browser, dashboard: Dashboard, feeder: Feeder, notices: dict[str, Notice]
) -> None:
    with stranger(browser, notices["proposal_opened"].url(dashboard.url)) as page:
        expect(page.locator(".strip .name")).to_have_text(feeder.name)
        expect(page.get_by_role("button", name="Approve…")).to_be_visible()
    for kept in ("live", "recorded"):
        if kept == "recorded":
            record(dashboard, feeder)
        with stranger(browser, notices["incident_opened"].url(dashboard.url)) as page:
            expect(page.get_by_role("heading", name="GPU r1/3 failed")).to_be_visible()
            expect(page.get_by_role("region", name="Timeline")).to_contain_text("failed")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("?", "Where the time went"),
        ("racks?gpu=r1/3&", "GPU r1/3"),
        ("racks?rack=r1&", "GPUs that match"),
        ("replicas?replica=1&", "Units per slot, replica 1 first"),
        ("power?", None),
    ],
)
def test_an_address_alone_leads_there(
    browser: Browser, dashboard: Dashboard, feeder: Feeder, address: str, shown: str | None
) -> None:
    with stranger(browser, f"{dashboard.url}/{address}run={feeder.run}") as page:
        expect(page.locator(".strip .name")).to_have_text(feeder.name)
        if shown is not None:
            expect(page.get_by_role("heading", name=shown)).to_be_visible()
        if "rack=r1" in address:
            expect(page.get_by_text("8 GPUs in 1 rack match.")).to_be_visible()
        if "replica=1" in address:
            chosen = page.get_by_role("table", name="Pace").locator("tr.on")
            expect(chosen).to_contain_text("1, r1")


def test_a_copied_link_leads_back(browser: Browser, dashboard: Dashboard, feeder: Feeder) -> None:
    feeder.fault("r1/3", "kill")
    services.wait_until(lambda: feeder.proposal is not None, 10.0, "a proposal")
    for address, heading in (
        ("racks?gpu=r1/3&", "GPU r1/3"),
        ("incidents?", "GPU r1/3 failed"),
        ("replicas?replica=1&", "replica 1 first"),
        ("reconfigure?", None),
    ):
        with stranger(browser, f"{dashboard.url}/{address}run={feeder.run}") as page:
            page.get_by_role("button", name="Copy link").first.click()
            expect(page.get_by_text("The link is copied")).to_be_attached()
            link = str(page.evaluate("navigator.clipboard.readText()"))
        assert f"run={feeder.run}" in link
        with stranger(browser, link) as page:
            if heading is not None:
                expect(page.get_by_role("heading", name=heading)).to_be_visible()
            else:
                expect(page.get_by_role("button", name="Approve…")).to_be_visible()


def test_a_link_to_what_is_gone_says_so(
    browser: Browser, dashboard: Dashboard, feeder: Feeder
) -> None:
    with stranger(browser, f"{dashboard.url}/reconfigure?run={feeder.run}&proposal=p99") as page:
        expect(page.get_by_text("no proposal p99")).to_be_visible()
    with stranger(browser, f"{dashboard.url}/incidents?run={feeder.run}&incident=i99") as page:
        expect(page.get_by_text("no incident i99")).to_be_visible()
    with stranger(browser, f"{dashboard.url}/racks?run={feeder.run}&gpu=r9/9") as page:
        expect(page.get_by_text("no GPU r9/9")).to_be_visible()
    with stranger(browser, f"{dashboard.url}/reconfigure?run=gone-1&proposal=p1") as page:
        expect(page.get_by_text("Run gone-1 is not live any more")).to_be_visible()
        page.get_by_role("button", name="Look back at this run").click()
        expect(page).to_have_url(re.compile(r"/history\?run=gone-1"))


def test_a_search_in_the_history_is_an_address(
    browser: Browser, dashboard: Dashboard, feeder: Feeder
) -> None:
    past = Feeder(MemoryStore(), run=f"{feeder.run}-kept", name="kept", prefill=30)
    past.begin()
    past.end()
    record(dashboard, feeder, past)
    address = f"{dashboard.url}/history?search={feeder.run}&period=last+week&status=stopped"
    runs = "Recorded runs"
    with stranger(browser, address) as page:
        table = page.get_by_role("table", name=runs)
        expect(table).to_contain_text("kept")
        expect(table.locator("tbody tr")).to_have_count(1)
        expect(page.get_by_role("textbox", name="Search runs")).to_have_value(feeder.run)
        # What is typed goes into the address, and a picked run beside it
        page.get_by_role("textbox", name="Search runs").fill("kept")
        page.get_by_role("textbox", name="Search runs").press("Enter")
        expect(page).to_have_url(re.compile(r"search=kept"))
        table.get_by_text(past.run).click()
        expect(page).to_have_url(re.compile(rf"run={past.run}"))
        expect(page).to_have_url(re.compile(r"period=last"))
        copied = page.url
    with stranger(browser, copied) as page:
        expect(page.get_by_role("heading", name=f"kept ({past.run})")).to_be_visible()
    with stranger(browser, f"{dashboard.url}/history?tag=never&period=sometimes") as page:
        # What an address cannot mean filters nothing. (The list may be some seconds old.)
        expect(page.get_by_role("table", name=runs).locator("tbody tr").nth(1)).to_be_visible()
