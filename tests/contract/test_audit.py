"""The audit: one chain, exactly once, in the order of the streams; any change of it is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from storage.audit import AuditNote, AuditRow, chained
from storage.audit_records import CommandAnswered, SignedIn
from storage.history import audit
from storage.history.retention import thin_steps
from storage.history.rows import BadEntry
from storage.history.writer import HistoryWriter
from tests.contract import records
from tests.contract.records import RUN

ODD = "ana 'x'; --\n\x00\x1b[31m\u2603"


def _answered(seq: int, run: str = RUN, **changes: Any) -> CommandAnswered:
    fields: dict[str, Any] = {
        "seq": seq, "at": 1000 + seq, "run": run, "id": f"c{seq}", "who": "ana",
        "role": "approver", "via": "browser", "what": "decide: proposal p1, verdict approved",
        "reason": "looks good", "ok": True, "code": "done", "message": "proposal p1 approved",
    }  # fmt: skip
    return CommandAnswered(**fields | changes)


def _filled(engine: Engine) -> list[AuditRow]:
    writer = HistoryWriter(engine)
    writer.write(RUN, [_answered(1), records.step(2), _answered(3, who=ODD, reason=ODD)], 1.0)
    writer.write("run-2", [_answered(1, run="run-2", code="not_allowed", ok=False)], 2.0)
    by_policy = records.decision(4, via="policy", who="policy")
    writer.write(RUN, [by_policy, records.decision(5)], 3.0)
    return list(reversed(audit.list_audit(engine)))


def test_rows_are_chained_in_the_order_they_were_recorded(engine: Engine) -> None:
    rows = _filled(engine)
    assert [(row.number, row.run, row.seq) for row in rows] == [
        (1, RUN, 1), (2, RUN, 3), (3, "run-2", 1), (4, RUN, 4),
    ]  # fmt: skip
    assert [row.previous for row in rows] == ["", *(row.hash for row in rows[:-1])]
    assert (rows[0].who, rows[0].role, rows[0].reason) == ("ana", "approver", "looks good")
    assert rows[0].result == "done: proposal p1 approved"
    assert rows[1].who == "ana 'x'; --\\x0a\\x00\\x1b[31m\u2603"
    assert rows[2].result.startswith("not_allowed")
    assert rows[3].via == "policy"
    found = audit.verify(engine)
    assert (found.ok, found.num_rows, found.head) == (True, 4, rows[-1].hash)


def test_recording_again_changes_nothing(engine: Engine) -> None:
    rows = _filled(engine)
    HistoryWriter(engine).write(RUN, [_answered(1), _answered(3)], 9.0)
    assert list(reversed(audit.list_audit(engine))) == rows


def test_a_transaction_that_fails_leaves_no_row(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr("storage.history.writer._summarise", crash)
        with pytest.raises(RuntimeError):
            HistoryWriter(engine).write(RUN, [_answered(1)], 1.0)
    assert audit.list_audit(engine) == []
    HistoryWriter(engine).write(RUN, [_answered(1)], 1.0)
    assert audit.verify(engine).num_rows == 1


def test_what_was_lost_is_said(engine: Engine) -> None:
    bad = BadEntry(seq=5, at=9.0, error="not a record", body=b"x")
    HistoryWriter(engine).write(RUN, [_answered(3), bad], 9.0)
    lost = [row for row in audit.list_audit(engine) if row.result == "lost"]
    assert [row.what for row in reversed(lost)] == [
        "entries 1 to 2", "entry 4", "entry 5: not a record",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET who = 'bob' WHERE number = 2",
        "DELETE FROM audit WHERE number = 2",
        "DELETE FROM audit",
        "TRUNCATE audit",
        "INSERT OR REPLACE INTO audit SELECT * FROM audit WHERE number = 2",
        "INSERT INTO audit SELECT 9, previous, run, 77, at, id, who, role, via, what, reason, "
        "result, hash FROM audit WHERE number = 2",
    ],
)
def test_the_database_refuses_changes(engine: Engine, statement: str) -> None:
    rows = _filled(engine)
    with pytest.raises(SQLAlchemyError), engine.begin() as connection:
        connection.execute(text(statement))
    assert list(reversed(audit.list_audit(engine))) == rows


def _unguarded(engine: Engine, *statements: str) -> None:
    """What somebody does who owns the database: takes the triggers away, and puts them back."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("ALTER TABLE audit DISABLE TRIGGER ALL"))
        else:
            kept = connection.execute(
                text(
                    "SELECT name, sql FROM sqlite_master WHERE tbl_name='audit' AND type='trigger'"
                )
            ).all()
            for name, _ in kept:
                connection.execute(text(f"DROP TRIGGER {name}"))
        for statement in statements:
            connection.execute(text(statement))
        if engine.dialect.name == "postgresql":
            connection.execute(text("ALTER TABLE audit ENABLE TRIGGER ALL"))
        else:
            for _, sql in kept:
                connection.exec_driver_sql(sql)


@pytest.mark.parametrize(
    ("statement", "broken", "why"),
    [
        ("UPDATE audit SET who = 'bob' WHERE number = 2", 2, "hash does not fit"),
        ("UPDATE audit SET reason = 'x' WHERE number = 4", 4, "hash does not fit"),
        ("UPDATE audit SET at = at + 0.001 WHERE number = 1", 1, "hash does not fit"),
        ("UPDATE audit SET previous = '' WHERE number = 3", 3, "does not follow"),
        ("DELETE FROM audit WHERE number = 1", 2, "row 1 is missing"),
        ("DELETE FROM audit WHERE number = 3", 4, "row 3 is missing"),
    ],
)
def test_verify_names_the_first_broken_row(
    engine: Engine, statement: str, broken: int, why: str
) -> None:
    _filled(engine)
    _unguarded(engine, statement)
    found = audit.verify(engine)
    assert (found.ok, found.broken) == (False, broken)
    assert why in found.why


def test_a_noted_head_finds_a_chain_written_anew_or_cut_off(engine: Engine) -> None:
    rows = _filled(engine)
    noted = audit.head(engine)
    assert audit.verify(engine, expect=noted).ok
    HistoryWriter(engine).write(RUN, [_answered(9)], 9.0)
    assert audit.verify(engine, expect=noted).ok
    _unguarded(engine, "DELETE FROM audit WHERE number > 2")
    assert audit.verify(engine).ok
    assert "cut off" in audit.verify(engine, expect=noted).why
    forged = chained([replace(row, who="bob") for row in rows], 0, "")
    _unguarded(engine, "DELETE FROM audit")
    with engine.begin() as connection:
        audit.append(connection, [replace(row, who="bob") for row in rows])
    assert audit.verify(engine).head == forged[-1].hash
    assert "written anew" in audit.verify(engine, expect=noted).why


def test_missing_triggers_are_found(engine: Engine) -> None:
    _filled(engine)
    on = " ON audit" if engine.dialect.name == "postgresql" else ""
    with engine.begin() as connection:
        connection.execute(text(f"DROP TRIGGER audit_next{on}"))
    assert "triggers" in audit.verify(engine).why


def test_retention_never_touches_it(engine: Engine) -> None:
    rows = _filled(engine)
    thin_steps(engine, now=1e12)
    assert list(reversed(audit.list_audit(engine))) == rows


def test_notes_are_recorded_once_and_forged_ones_are_called_so(engine: Engine) -> None:
    came = SignedIn(id="s1", at=1.0, who="ana", via="browser", role="viewer", event="signed in")
    note = AuditNote(run="", code="", asked=came)
    refused = AuditNote(run=RUN, code="expired", asked=records.decide())
    notes: list[tuple[int, float, AuditNote | str]] = [
        (10, 5.0, note), (11, 6.0, refused), (12, 7.0, "does not decode"),
    ]  # fmt: skip
    for _ in range(2):
        audit.record_notes(engine, notes, 8.0, lambda asked, run: asked is came)
    assert audit.notes_position(engine) == 12
    rows = list(reversed(audit.list_audit(engine)))
    assert [(row.number, row.run, row.seq, row.at) for row in rows] == [
        (1, "", 10, 5.0), (2, "", 11, 6.0), (3, "", 12, 7.0),
    ]  # fmt: skip
    assert rows[0].what == "signed in"
    assert rows[0].result == "done"
    assert rows[1].what.startswith(f"for run {RUN}: decide: proposal ")
    assert rows[1].result == "refused: expired; not signed by a known writer: it may be forged"
    assert rows[2].result == "lost"
    assert audit.verify(engine).ok


def test_search_and_limit(engine: Engine) -> None:
    _filled(engine)
    assert [row.number for row in audit.list_audit(engine, search="NOT_ALLOWED")] == [3]
    assert [row.number for row in audit.list_audit(engine, run=RUN, limit=2)] == [4, 2]
