"""`counterpoise audit`: rows as JSON and as a table, a broken chain is exit code 1 and a number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import text

from runtime.cli import cli
from runtime.errors import UserError
from storage.audit import AuditNote
from storage.audit_records import SignedIn
from storage.history.audit import record_notes
from storage.history.database import open_history
from storage.history.schema import upgrade


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COUNTERPOISE_HOME", str(tmp_path))
    return tmp_path


def _fill(home: Path, *statements: str) -> None:
    engine = open_history(f"sqlite:///{home}/history.db")
    upgrade(engine)
    notes: list[tuple[int, float, AuditNote | str]] = []
    for number in (1, 2, 3):
        came = SignedIn(
            id=f"s{number}", at=1.0, who=f"ana-{number}", via="browser", role="viewer",
            event="signed in",
        )  # fmt: skip
        notes.append((number, 1000.0 + number, AuditNote(run="", code="", asked=came)))
    record_notes(engine, notes, 9.0, lambda asked, run: True)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def test_rows_are_listed_and_the_chain_verified(home: Path) -> None:
    _fill(home)
    listed = CliRunner().invoke(cli, ["audit", "list", "--json", "--limit", "2"])
    rows = json.loads(listed.output)
    assert [(row["number"], row["who"], row["what"]) for row in rows] == [
        (3, "ana-3", "signed in"),
        (2, "ana-2", "signed in"),
    ]
    shown = CliRunner().invoke(cli, ["audit", "list", "--search", "ana-1"])
    assert "signed in" in shown.output
    assert "ana-2" not in shown.output
    verified = CliRunner().invoke(cli, ["audit", "verify", "--json"])
    assert verified.exit_code == 0
    found = json.loads(verified.output)
    assert (found["ok"], found["num_rows"], found["head"]) == (True, 3, rows[0]["hash"])
    noted = CliRunner().invoke(cli, ["audit", "verify", "--expect", f"2:{rows[1]['hash']}"])
    assert noted.exit_code == 0


def test_a_broken_chain_names_its_first_broken_row(home: Path) -> None:
    _fill(home, "DROP TRIGGER audit_no_update", "UPDATE audit SET who = 'bob' WHERE number = 2")
    result = CliRunner().invoke(cli, ["audit", "verify"])
    assert result.exit_code == 1
    assert "row 2: its hash does not fit" in result.output
    assert "(1 rows before it are good)" in result.output
    wrong = CliRunner().invoke(cli, ["audit", "verify", "--expect", "2"])
    assert isinstance(wrong.exception, UserError)


def test_without_a_history_it_says_how_to_get_one(home: Path) -> None:
    result = CliRunner().invoke(cli, ["audit", "list"])
    assert isinstance(result.exception, UserError)
    assert "recorder" in str(result.exception)
