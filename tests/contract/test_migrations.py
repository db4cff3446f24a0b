"""Migrations: from nothing, from every version there ever was, and not from the future."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, inspect, text

from storage.history import audit
from storage.history.database import open_history
from storage.history.queries import History
from storage.history.schema import HistorySchemaError, schema_state, upgrade
from storage.history.tables import METADATA
from storage.history.writer import HistoryWriter
from tests.contract import records
from tests.contract.records import RUN

DUMPS = sorted((Path(__file__).parent / "data").glob("history_*.sql"))


def test_a_missing_schema_is_said_and_nothing_created(empty_url: str, tmp_path: Path) -> None:
    engine = open_history(empty_url)
    state = schema_state(engine)
    assert (state.state, state.found) == ("missing", "")
    assert "recorder" in state.message
    assert list(tmp_path.iterdir()) == []
    engine.dispose()


def test_migrations_make_the_tables_of_the_code(engine: Engine) -> None:
    assert History(engine).schema_state().state == "ready"
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []


def test_several_daemons_may_upgrade_at_once(empty_url: str) -> None:
    engines = [open_history(empty_url) for _ in range(12)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(upgrade, engines))
    for engine in engines:
        assert schema_state(engine).state == "ready"
        engine.dispose()


def test_a_newer_schema_is_left_alone(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'v999'"))
    state = schema_state(engine)
    assert (state.state, state.found) == ("new", "v999")
    with pytest.raises(HistorySchemaError, match="newer"):
        upgrade(engine)
    assert "runs" in inspect(engine).get_table_names()


@pytest.mark.parametrize("dump", DUMPS, ids=lambda path: path.stem)
def test_a_stored_database_of_each_version_upgrades(dump: Path, tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    old = sqlite3.connect(file)
    old.executescript(dump.read_text(encoding="utf-8"))
    old.close()
    engine = open_history(f"sqlite:///{file}")
    upgrade(engine)
    history = History(engine)
    assert history.schema_state().state == "ready"
    run = history.run(RUN)
    assert run is not None
    assert (run.steps, run.status, len(history.steps(RUN))) == (9, "stopped", 9)
    assert [formed.first_step for formed in history.generations(RUN)] == [0]
    assert [proposal.id for proposal in history.proposals(RUN)] == ["p-6", "p-16"]
    assert history.decisions(RUN)[0].who == "ana"
    assert history.ledger(RUN)["productive"] == 20.0
    assert [event.kind for event in history.events(RUN)] == ["gpu_failed", "gpu_failed"]
    assert HistoryWriter(engine).write(RUN, [records.event(21)], 1.0) == 21
    found = audit.verify(engine)
    assert (found.why, found.num_rows) == ("", int(dump.stem not in ("history_v1", "history_v2")))
    engine.dispose()


def test_there_is_a_stored_database_of_this_version(tmp_path: Path) -> None:
    engine = open_history(f"sqlite:///{tmp_path / 'history.db'}")
    expected = schema_state(engine).expected
    assert f"history_{expected}" in {path.stem for path in DUMPS}, (
        "add a dump of the new schema: python -m tests.contract.make_dump"
    )
    engine.dispose()
