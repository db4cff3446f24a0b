"""The Power page in a real browser over a real run: budgets, a cut, the journal of caps."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser, Page, expect

from runtime.bench.drill import Drill
from runtime.cli import cli
from runtime.config import (
    ClusterConfig,
    Config,
    EmulatedConfig,
    ModelConfig,
    RackConfig,
    TrainConfig,
)
from runtime.control.local import LocalRun
from storage import sign_in
from storage.live.redis_store import RedisStore
from storage.records import EventHappened
from tests.support import services
from tests.support.dashboard import Dashboard
from tests.support.feeder import Feeder
from tests.support.pages import DEADLINE_MS, DESKTOP, confirm, dialog

RUN = "power-page"
SECRET = "what-only-the-proxy-knows"
CONFIG = Config(
    name="watts",
    model=ModelConfig(num_layers=1),
    train=TrainConfig(seq_len=16, global_batch=4, micro_batch=4),
    cluster=ClusterConfig(
        racks=(RackConfig(name="rack-0", gpus=2), RackConfig(name="rack-1", gpus=2))
    ),
    emulated=EmulatedConfig(step_s=0.3),
)


@pytest.mark.browser
@pytest.mark.timeout(180)
def test_a_budget_cut_from_the_shell_shows_on_the_page(
    console_page: Page,
    dashboard: Dashboard,
    server: services.RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = console_page
    monkeypatch.setenv("COUNTERPOISE_REDIS_URL", server.url)
    monkeypatch.setenv("COUNTERPOISE_HOME", str(tmp_path))
    store = RedisStore.for_service(server.url)
    with LocalRun(CONFIG, home=tmp_path, run=RUN, store=store) as run:
        Drill(run).more_steps(3, 60.0)
        page.goto(f"{dashboard.url}/power?run={RUN}")
        expect(page.locator(".tile", has_text="Budget")).to_contain_text("4000 W")
        expect(page.get_by_text("No cap has been set yet")).to_be_visible()
        expect(page.get_by_text("Rack rack-0, last 5 minutes")).to_be_visible()

        cut = CliRunner().invoke(
            cli, ["power", "budget", "rack-1", "1500", "--reason", "facility", "--run", RUN]
        )
        assert cut.exit_code == 0, cut.output
        assert "budget cut from 2000 W to 1500 W" in cut.output
        expect(page.get_by_text("2 caps from 1000 W to 750 W").first).to_be_visible()
        expect(page.get_by_text("caps are held back by the rack's power budget")).to_be_visible()
        expect(page.locator(".tile", has_text="Budget")).to_contain_text("3500 W")

        shown = CliRunner().invoke(cli, ["power", "show", "--run", RUN])
        assert shown.exit_code == 0, shown.output
        assert "1,500 W" in shown.output
        assert "2 caps from 1000 W to 750 W" in shown.output
        refused = CliRunner().invoke(cli, ["power", "budget", "rack-1", "100", "--run", RUN])
        assert refused.exit_code == 1
        assert "400 W or more" in refused.output

        _set_budget_on_the_page(page, run)
        # Or the page would look for a run that ends now, and say so on its console
        page.goto("about:blank")
    store.close()


def _set_budget_on_the_page(page: Page, run: LocalRun) -> None:
    """Opened, thought better of, set, refused: as `counterpoise power budget` would do it."""
    page.locator("tr", has_text="rack-0").first.click()
    opens = page.get_by_role("button", name="Set budget of rack-0…")
    opens.click()
    expect(dialog(page).get_by_text("It stands at 2000 W")).to_be_visible()
    dialog(page).get_by_role("button", name="Cancel").click()
    expect(dialog(page)).to_have_count(0)

    after = len(run.entries)
    opens.click()
    dialog(page).get_by_label("Watts").fill("1600")
    dialog(page).get_by_label("Reason").fill("cooling")
    confirm(page, "Set budget")
    asked: EventHappened = run.wait_for(
        lambda one: isinstance(one, EventHappened) and one.kind == "budget_changed", 10.0, after
    )
    assert (asked.rack, asked.details["to_w"], asked.details["via"]) == (
        "rack-0",
        1600.0,
        "browser",
    )
    assert asked.message.endswith(f"by {getpass.getuser()}: cooling")
    expect(page.get_by_text("2 caps from 1000 W to 800 W").first).to_be_visible()
    expect(page.locator(".tile", has_text="Budget")).to_contain_text("3100 W")
    expect(page.get_by_text("rack-0: budget cut from 2000 W to 1600 W").last).to_be_visible()

    opens.click()
    dialog(page).get_by_label("Watts").fill("100")
    dialog(page).get_by_role("button", name="Set budget", exact=True).click()
    expect(page.get_by_text("400 W or more").first).to_be_visible()
    if dialog(page).count():
        dialog(page).get_by_role("button", name="Close", exact=True).last.click()
    expect(dialog(page)).to_have_count(0)
    expect(page.locator(".tile", has_text="Budget")).to_contain_text("3100 W")

    opens.click()
    expect(dialog(page).get_by_label("Watts")).to_have_count(1)
    dialog(page).get_by_label("Watts").fill("0")
    confirm(page, "Set budget")
    expect(page.locator(".tile", has_text="Budget")).to_contain_text("3500 W")


@pytest.mark.browser
def test_whoever_is_no_admin_sees_budgets_and_sets_none(
    server: services.RedisServer, browser: Browser, feeder: Feeder, tmp_path: Path
) -> None:
    more = {
        "COUNTERPOISE_AUTH": "proxy",
        sign_in.PROXY_SECRET: SECRET,
        sign_in.ROLES_OF: "approver=leads; admin=platform",
    }
    signed = Dashboard(tmp_path, server.url, more)
    signed.start()
    try:
        for group, can in (("leads", False), ("platform", True)):
            headers = {
                "X-Forwarded-User": "otis", "X-Forwarded-Groups": group,
                sign_in.SECRET_HEADER: SECRET,
            }  # fmt: skip
            context = browser.new_context(viewport=DESKTOP, extra_http_headers=headers)
            context.set_default_timeout(DEADLINE_MS)
            page = context.new_page()
            page.goto(f"{signed.url}/power?run={feeder.run}")
            button = page.get_by_role("button", name="Set budget of")
            expect(button).to_be_visible()
            if can:
                expect(button).to_be_enabled()
            else:
                expect(button).to_be_disabled()
                expect(page.get_by_text("This takes the role admin or higher")).to_be_visible()
            context.close()
    finally:
        signed.kill()
