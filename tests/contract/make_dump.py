"""Writes a small history of the current schema version into data/, for the migrations of later
versions to be tested against. Run once per schema version; never change a stored one."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

from storage.audit import AuditNote
from storage.audit_records import SignedIn
from storage.history import audit
from storage.history.database import open_history
from storage.history.schema import schema_state, upgrade
from storage.history.writer import HistoryWriter
from tests.contract import records


def main() -> None:
    """Refuses to replace a stored dump."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "history.db"
        engine = open_history(f"sqlite:///{file}")
        upgrade(engine)
        entries = [*records.journal(19), records.ended(20)]
        HistoryWriter(engine).write(records.RUN, entries, 1020.0)
        came = SignedIn(
            id="s-1", at=1021.0, who="ana", via="browser", role="viewer", event="signed in"
        )
        note = AuditNote(run="", code="", asked=came)
        audit.record_notes(engine, [(1, 1021.0, note)], 1022.0, lambda asked, run: True)
        target = Path(__file__).parent / "data" / f"history_{schema_state(engine).expected}.sql"
        engine.dispose()
        database = sqlite3.connect(file)
        with target.open("x", encoding="utf-8") as dump:
            dump.writelines(f"{line}\n" for line in database.iterdump())
        database.close()


if __name__ == "__main__":
    main()
