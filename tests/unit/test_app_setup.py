"""A dashboard that is set up wrongly says so in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

MAIN = Path(__file__).parents[2] / "app" / "main.py"


def test_a_wrong_address_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COUNTERPOISE_HOME", str(tmp_path))
    monkeypatch.setenv("COUNTERPOISE_REDIS_URL", "ftp://:secret@somewhere")
    app = AppTest.from_file(MAIN, default_timeout=15).run()
    text = " ".join(one.value for one in app.markdown)
    assert "COUNTERPOISE_REDIS_URL" in text
    assert "secret" not in text
    assert not app.exception
