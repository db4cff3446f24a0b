"""The Power page in a real browser over a real run: budgets, a cut, the journal of caps."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from playwright.sync_api import Page, expect

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
from storage.live.redis_store import RedisStore
from tests.support import services
from tests.support.dashboard import Dashboard

RUN = "power-page"
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
        # Or the page would look for a run that ends now, and say so on its console
        page.goto("about:blank")
    store.close()
