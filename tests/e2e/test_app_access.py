"""Can everyone use it: axe-core on every page in both themes, and the keyboard alone."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.conftest import missing
from tests.support.dashboard import Dashboard
from tests.support.feeder import Feeder
from tests.support.pages import DESKTOP, dialog, record, visit

# Page, and what more is in the address
VIEWS = (
    ("", ""), ("racks", "&gpu=r1/3"), ("replicas", ""), ("replicas", "&replica=1"), ("power", ""),
    ("reconfigure", ""), ("incidents", ""), ("history", ""), ("history", "&compare={run}"),
    ("history", "&audit"),
)  # fmt: skip
GRAVE = ("serious", "critical")
# Streamlit's own frame, which we cannot change
NOT_OURS = ("[data-testid=stToolbar]", "[data-testid=stDecoration]", "[data-testid=stStatusWidget]")
# A page of the app has its heading in the navigation; the landmarks are Streamlit's
RULES_NOT_OURS = ("landmark-one-main", "page-has-heading-one", "region")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    browser: Browser, dashboard: Dashboard, feeder: Feeder, scheme: str
) -> None:
    try:
        from axe_playwright_python.sync_playwright import Axe
    except ImportError:
        missing("axe-playwright-python (pip install -e .[dev])")
    feeder.fault("r1/3", "kill")
    record(dashboard, feeder)
    context = browser.new_context(viewport=DESKTOP, color_scheme=scheme)  # type: ignore[arg-type]
    page, found = context.new_page(), []
    options = {"rules": {name: {"enabled": False} for name in RULES_NOT_OURS}}
    for path, more in VIEWS:
        visit(page, dashboard, path, feeder, more.format(run=feeder.run))
        expect(page.locator(".cp").nth(1)).to_be_visible()
        result = Axe().run(page, context={"exclude": [[one] for one in NOT_OURS]}, options=options)
        found += [
            f"{scheme} /{path}{more} {one['id']}: {node['html'][:160]} "
            f"{node['failureSummary'][-200:]}"
            for one in result.response["violations"]
            if one["impact"] in GRAVE
            for node in one["nodes"]
        ]
    context.close()
    assert found == []


def test_the_keyboard_is_enough(page: Page, dashboard: Dashboard, feeder: Feeder) -> None:
    feeder.fault("r1/3", "kill")
    visit(page, dashboard, "", feeder)
    row = page.get_by_role("table", name="Incidents").locator("tbody tr").first
    row.focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/incidents"))
    visit(page, dashboard, "reconfigure", feeder)
    page.get_by_role("button", name="Approve…").focus()
    page.keyboard.press("Enter")
    expect(dialog(page).get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog(page)).to_have_count(0)
