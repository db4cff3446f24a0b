"""People sign in at a real OpenID Connect provider, or through a proxy; their role decides what the
pages let them do."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from storage import sign_in
from storage.history.audit import list_audit
from storage.history.database import open_history
from storage.history.schema import upgrade
from storage.identity import WRITERS, not_genuine, writer_key
from storage.live.redis_store import RedisStore
from storage.recorder import Recorder
from tests.support import leaks, services
from tests.support.dashboard import Dashboard
from tests.support.feeder import Feeder
from tests.support.pages import (
    DEADLINE_MS,
    DESKTOP,
    await_ticks,
    confirm,
    dialog,
    record,
    visit,
)
from tests.support.provider import Provider

COOKIE_SECRET = "a-cookie-secret-of-32-characters-at-least"
LEFT_S = 30.0
PROXY_SECRET = "what-only-the-proxy-knows"
ROLES = "viewer=staff; operator=sre; approver=leads; admin=platform"
PEOPLE = {
    "vera@example.org": ["staff"],
    "lea@example.org": ["staff", "leads"],
    "otto@example.org": ["elsewhere"],
}


@contextmanager
def _running(server: services.RedisServer, more: dict[str, str]) -> Iterator[Dashboard]:
    with tempfile.TemporaryDirectory(prefix="counterpoise-app-") as home:
        running = Dashboard(Path(home), server.url, more)
        try:
            running.start()
            yield running
        finally:
            running.kill()


@pytest.fixture
def signed(server: services.RedisServer, tmp_path: Path) -> Iterator[tuple[Dashboard, Provider]]:
    """A dashboard that signs people in at a provider of its own."""
    store = RedisStore.for_service(server.url)
    for place, _, _ in store.read_notes(0):
        store.acknowledge_notes(place)
    store.close()
    secrets = tmp_path / "secrets.toml"
    more = {"COUNTERPOISE_AUTH": "oidc", sign_in.SECRETS: str(secrets), sign_in.ROLES_OF: ROLES}
    with tempfile.TemporaryDirectory(prefix="counterpoise-app-") as home:
        running = Dashboard(Path(home), server.url, more)
        provider = Provider(PEOPLE, f"{running.url}/oauth2callback")
        secrets.write_text(provider.secrets_toml(COOKIE_SECRET))
        secrets.chmod(0o600)
        try:
            running.start()
            yield running, provider
        finally:
            running.kill()
            provider.close()


def _record_notes(dashboard: Dashboard, feeder: Feeder) -> None:
    """As the recorder does it."""
    engine = open_history(f"sqlite:///{dashboard.home}/history.db")
    keys = {writer: writer_key(dashboard.home, writer) for writer in WRITERS}
    Recorder(
        feeder.store,
        engine,
        clock=time.time,
        stop=threading.Event(),
        is_genuine=lambda asked, run: not not_genuine(asked, run, keys),
    ).record_once()
    engine.dispose()


def _record_until(dashboard: Dashboard, feeder: Feeder, result: str) -> None:
    """Until the audit has a row with this result."""
    engine = open_history(f"sqlite:///{dashboard.home}/history.db")
    upgrade(engine)

    def there() -> bool:
        _record_notes(dashboard, feeder)
        return any(row.result == result for row in list_audit(engine))

    services.wait_until(there, 15.0, f"a row {result!r}")
    engine.dispose()


def _sign_in(page: Page, who: str) -> None:
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Who are you?")).to_be_visible()
    page.get_by_role("link", name=who).click()


def _sign_out(page: Page) -> None:
    """Until the browser is back from the provider: a click before that goes under."""
    with page.expect_response(
        lambda one: one.request.is_navigation_request() and one.status == 200
    ):
        page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()


def test_a_viewer_sees_and_cannot_act_an_approver_can(
    signed: tuple[Dashboard, Provider], page: Page, feeder: Feeder
) -> None:
    dashboard, provider = signed
    feeder.fault("r1/3", "kill")
    page.goto(f"{dashboard.url}/reconfigure?run={feeder.run}")
    expect(page.get_by_text("Sign in to see runs")).to_be_visible()
    assert page.locator(".strip").count() == 0

    _sign_in(page, "vera@example.org")
    # Back at the page that was asked for, not at the root
    expect(page).to_have_url(f"{dashboard.url}/reconfigure?run={feeder.run}")
    expect(page.get_by_text("Signed in as vera@example.org, viewer.")).to_be_visible()
    for name in ("Approve…", "Reject…", "Ask"):
        expect(page.get_by_role("button", name=name)).to_be_disabled()
    expect(
        page.get_by_text("This takes the role approver or higher; yours is viewer.").first
    ).to_be_visible()

    _sign_out(page)
    _sign_in(page, "lea@example.org")
    visit(page, dashboard, "reconfigure", feeder)
    expect(page.get_by_text("Signed in as lea@example.org, approver.")).to_be_visible()
    page.get_by_role("button", name="Approve…").click()
    expect(dialog(page).get_by_text("Recorded as lea@example.org")).to_be_visible()
    confirm(page, "Approve")
    services.wait_until(
        lambda: feeder.proposal is not None and feeder.proposal.decided_by == "lea@example.org",
        15.0,
        "a decision by whoever is signed in",
    )
    record(dashboard, feeder)
    _record_notes(dashboard, feeder)
    visit(page, dashboard, "history", feeder, "&audit=1")
    rows = page.get_by_role("table", name="Audit").locator("tbody tr")
    for who, what in (
        ("vera@example.org", "signed in"),
        ("vera@example.org", "signed out"),
        ("lea@example.org", "signed in"),
    ):
        expect(rows.filter(has_text=who).filter(has_text=what).first).to_contain_text("done")
    # Those of other dashboards, with keys of their own, are not ours to judge
    assert rows.filter(has_text="example.org").filter(has_text="may be forged").count() == 0
    secrets = {"cookie": COOKIE_SECRET, "client": provider.client_secret}
    assert leaks.containing([dashboard.home], secrets) == []
    page.get_by_role("button", name="Verify the chain").click()
    expect(page.get_by_text("Unbroken")).to_be_visible()


def test_without_a_role_there_is_no_page(
    signed: tuple[Dashboard, Provider], page: Page, feeder: Feeder
) -> None:
    dashboard, provider = signed
    page.goto(dashboard.url)
    _sign_in(page, "otto@example.org")
    expect(
        page.get_by_text("You are signed in as otto@example.org, but have no role")
    ).to_be_visible()
    assert page.locator(".strip").count() == 0

    provider.issued_ago_s = 13 * 3600.0
    _sign_out(page)
    _sign_in(page, "lea@example.org")
    expect(page.get_by_text("Your sign-in is older than 12 h")).to_be_visible()


@pytest.mark.timeout(200)
def test_a_page_left_open_and_a_forced_button_do_not_act(
    signed: tuple[Dashboard, Provider], page: Page, feeder: Feeder
) -> None:
    dashboard, provider = signed
    feeder.fault("r1/3", "kill")
    page.goto(f"{dashboard.url}/reconfigure?run={feeder.run}")
    _sign_in(page, "vera@example.org")
    approve = page.get_by_role("button", name="Approve…")
    expect(approve).to_be_disabled()
    page.evaluate(
        "for (const one of document.querySelectorAll('button')) {"
        " one.disabled = false; one.removeAttribute('disabled') }"
    )
    approve.dispatch_event("click")
    await_ticks(page, 3)
    expect(dialog(page)).to_have_count(0)

    # An approver whose sign-in runs out while the dialog is open
    _sign_out(page)
    provider.issued_ago_s = 12 * 3600.0 - LEFT_S
    page.goto(f"{dashboard.url}/reconfigure?run={feeder.run}")
    _sign_in(page, "lea@example.org")
    approve.click()
    expect(dialog(page).get_by_text("Recorded as lea@example.org")).to_be_visible()
    expect(page.get_by_text("Your sign-in is older than 12 h")).to_be_visible(
        timeout=2_000 * LEFT_S
    )
    dialog(page).get_by_role("button", name="Approve", exact=True).click()
    _record_until(dashboard, feeder, "refused: not_allowed")
    assert feeder.proposal is not None
    assert feeder.proposal.state == "open"


def test_the_proxy_says_who_it_is_and_nobody_else_can(
    server: services.RedisServer, browser: Browser, feeder: Feeder
) -> None:
    more = {
        "COUNTERPOISE_AUTH": "proxy",
        sign_in.PROXY_SECRET: PROXY_SECRET,
        sign_in.ROLES_OF: ROLES,
        sign_in.SIGN_OUT: "/oauth2/sign_out",
    }
    said = {"X-Forwarded-User": "otis", "X-Forwarded-Groups": "staff,sre"}
    with _running(server, more) as dashboard:
        for secret, words in (("a-guess-of-the-secret", "sign-in proxy only"), (PROXY_SECRET, "")):
            context = browser.new_context(
                viewport=DESKTOP, extra_http_headers=said | {sign_in.SECRET_HEADER: secret}
            )
            context.set_default_timeout(DEADLINE_MS)
            page = context.new_page()
            page.goto(f"{dashboard.url}/reconfigure?run={feeder.run}")
            if words:
                expect(page.get_by_text(words)).to_be_visible()
                assert page.locator(".strip").count() == 0
            else:
                expect(page.get_by_text("Signed in as otis, operator.")).to_be_visible()
                expect(page.get_by_role("link", name="Sign out")).to_be_visible()
                expect(page.get_by_role("button", name="Ask")).to_be_enabled()
            context.close()
        assert PROXY_SECRET not in dashboard.log.read_text()


def test_local_mode_answers_for_this_machine_only(
    dashboard: Dashboard, browser: Browser, feeder: Feeder
) -> None:
    context = browser.new_context(viewport=DESKTOP)
    context.set_default_timeout(DEADLINE_MS)
    page = context.new_page()
    page.goto(f"http://localhost:{dashboard.port}/?run={feeder.run}")
    expect(
        page.get_by_text("Local mode: anyone who can open this page on 127.0.0.1")
    ).to_be_visible()
    # Chromium resolves every name under localhost to this machine, as a rebound name would be
    page.goto(f"http://evil.localhost:{dashboard.port}/?run={feeder.run}")
    expect(page.get_by_text("This dashboard is in local mode")).to_be_visible()
    assert page.locator(".strip").count() == 0
    context.close()
