"""Incidents, racks and history in a real browser: found, priced, compared, kept."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from storage.live.memory import MemoryStore
from tests.support import services
from tests.support.dashboard import Dashboard
from tests.support.feeder import Feeder
from tests.support.pages import DESKTOP, await_ticks, confirm, dialog, record, visit


@pytest.fixture
def page(console_page: Page) -> Page:
    return console_page


def approve(page: Page) -> None:
    page.get_by_role("button", name="Approve…").click()
    expect(dialog(page).get_by_role("button", name="Cancel")).to_be_focused()
    confirm(page, "Approve")


def ended_run(name: str) -> Feeder:
    feeder = Feeder(MemoryStore(), run=name, name=name, prefill=50)
    feeder.begin()
    feeder.end()
    return feeder


def test_an_incident_from_evidence_to_verified_recovery(
    page: Page, dashboard: Dashboard, feeder: Feeder
) -> None:
    visit(page, dashboard, "reconfigure", feeder)
    feeder.fault("r1/3", "kill")
    approve(page)
    expect(page.locator(".chip", has_text="applied, verified by the runtime")).to_be_visible()
    feeder.fault("r1/3", "repair")
    approve(page)
    services.wait_until(lambda: len(feeder.replicas[1].live) == 8, 20.0, "the replica whole again")
    page.get_by_role("link", name="Overview").click()
    expect(page.locator(".verdict")).to_contain_text("Training is healthy")
    expect(page.get_by_role("table", name="Incidents")).to_contain_text("recovered, verified")

    page.get_by_role("table", name="Incidents").get_by_text("GPU r1/3 failed").click()
    expect(page).to_have_url(re.compile(r"/incidents\?.*incident=i\d+"))
    parts = page.get_by_role("table", name="What each part cost")
    for part in ("detected", "waited", "applied", "ran reduced", "all of it"):
        expect(parts).to_contain_text(part)
    expect(parts).to_contain_text("GPU-h")
    others = page.get_by_role("table", name="Alternatives and their cost")
    expect(others).to_contain_text("What was done, decided at once")
    expect(others).to_contain_text("measured in generation")
    expect(page.get_by_role("region", name="Timeline")).to_contain_text("recovered, verified")

    # The address alone leads here again, also when the history tells it
    record(dashboard, feeder)
    page.reload()
    expect(page.get_by_role("region", name="Timeline")).to_contain_text("approved by")
    page.get_by_role("button", name="Show r1/3").click()
    expect(page.get_by_role("heading", name="GPU r1/3")).to_be_visible()


def test_racks_are_filtered_and_what_was_typed_stays(
    page: Page, dashboard: Dashboard, feeder: Feeder
) -> None:
    feeder.fault("r1/3", "kill")
    visit(page, dashboard, "racks", feeder)
    search = page.get_by_role("textbox", name="Search")
    search.fill("r0")
    search.press("Enter")
    expect(page.get_by_text("8 GPUs in 1 rack match.")).to_be_visible()
    search.fill("r1/3")
    await_ticks(page, 3)
    expect(search).to_have_value("r1/3")
    search.press("Enter")
    expect(page.get_by_text("1 GPU in 1 rack match.")).to_be_visible()
    expect(page.get_by_role("table", name="GPUs that match")).to_contain_text("failed")


def test_runs_are_compared_noted_and_sent(page: Page, dashboard: Dashboard, tmp_path: Path) -> None:
    runs = [ended_run("golden-1"), ended_run("golden-2")]
    record(dashboard, *runs)
    page.goto(f"{dashboard.url}/history?compare=golden-1,golden-2&baseline=golden-2")
    table = page.get_by_role("table", name="Runs", exact=True)
    expect(table.locator("tbody tr").first).to_contain_text("golden-2")
    expect(table).to_contain_text("baseline")
    page.get_by_role("radiogroup", name="By").get_by_text("Tokens").click()
    expect(page.get_by_text("million tokens committed")).to_be_visible()

    page.goto(f"{dashboard.url}/history?run=golden-1")
    page.get_by_role("button", name="Notes and tags").click()
    page.get_by_role("textbox", name="New note").fill("the one to beat")
    page.get_by_role("textbox", name=re.compile("Tags")).fill("golden")
    page.get_by_role("button", name="Keep").click()
    expect(page.get_by_role("table", name="Notes")).to_contain_text("the one to beat")
    with page.expect_download() as download:
        page.get_by_role("button", name="Report (HTML)").click()
    download.value.save_as(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "the one to beat" in text
    assert "<svg" in text
    with page.expect_download() as download:
        page.get_by_role("button", name="Steps (CSV)").click()
    download.value.save_as(tmp_path / "steps.csv")
    assert len((tmp_path / "steps.csv").read_text().splitlines()) == 51


def test_times_are_the_viewers_with_utc_beside(
    browser: Browser, dashboard: Dashboard, feeder: Feeder
) -> None:
    feeder.fault("r1/3", "kill")
    at = next(one.at for one in feeder.entries if getattr(one, "kind", "") == "gpu_failed")
    context = browser.new_context(viewport=DESKTOP, timezone_id="Asia/Tokyo")
    page = context.new_page()
    visit(page, dashboard, "", feeder)
    cell = page.get_by_role("table", name="Events").locator("td", has_text="UTC").last
    utc = time.strftime("%H:%M:%S", time.gmtime(at))
    tokyo = time.strftime("%H:%M:%S", time.gmtime(at + 9 * 3600))
    expect(cell).to_contain_text(f"{utc} UTC")
    expect(cell).to_contain_text(tokyo)
    context.close()
