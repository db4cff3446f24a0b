"""`up` killed outright: nothing of it is left, and the next one goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.services import wait_until
from tests.support.up import Up

CONFIG = """
[cluster]
racks = [{name = "rack-0", gpus = 2}, {name = "rack-1", gpus = 2}]
[emulated]
step_s = 0.2
"""


@pytest.mark.timeout(240)
def test_a_killed_up_takes_all_its_processes_along(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    up = Up(tmp_path / "home", "--config", str(config))
    try:
        up.start()
        up.await_line(r"dashboard +(http://127\.0\.0\.1:\d+)")
        up.await_line(r"training +first step committed")
        assert any("streamlit" in line for line in up.processes().values())
        up.kill_hard()
        wait_until(lambda: not up.processes(), 30.0, "the end of all its processes")
        up.start()
        up.await_line(r"training +first step committed")
        assert up.interrupt() == 0
        assert up.processes() == {}
    finally:
        up.kill_hard()
