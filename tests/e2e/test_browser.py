"""The browser that the other end-to-end tests drive."""

from __future__ import annotations

from playwright.sync_api import Page, expect


def test_browser_runs_scripts(page: Page) -> None:
    page.set_content("<p id='where'></p><script>where.textContent = 'rack-0/3'</script>")
    expect(page.locator("#where")).to_have_text("rack-0/3")
