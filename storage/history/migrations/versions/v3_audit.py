"""The audit: rows that can be added at the end of the chain, and neither changed nor removed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v3"
down_revision = "v2"
branch_labels = None
depends_on = None

# REPLACE would delete without a delete trigger: whatever is not the next link is refused as well.
SQLITE = [
    "CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit "
    "BEGIN SELECT RAISE(ABORT, 'the audit is insert-only'); END",
    "CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit "
    "BEGIN SELECT RAISE(ABORT, 'the audit is insert-only'); END",
    "CREATE TRIGGER audit_next BEFORE INSERT ON audit "
    "WHEN NEW.number IS NOT (SELECT COALESCE(MAX(number), 0) + 1 FROM audit) "
    "OR NEW.previous IS NOT "
    "COALESCE((SELECT hash FROM audit ORDER BY number DESC LIMIT 1), '') "
    "BEGIN SELECT RAISE(ABORT, 'not the next row of the audit'); END",
]
POSTGRES = [
    "CREATE FUNCTION audit_insert_only() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'the audit is insert-only'; END $$",
    "CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE ON audit "
    "FOR EACH ROW EXECUTE FUNCTION audit_insert_only()",
    "CREATE TRIGGER audit_no_truncate BEFORE TRUNCATE ON audit "
    "FOR EACH STATEMENT EXECUTE FUNCTION audit_insert_only()",
    "CREATE FUNCTION audit_next() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    "IF NEW.number <> (SELECT COALESCE(MAX(number), 0) + 1 FROM audit) OR NEW.previous <> "
    "COALESCE((SELECT hash FROM audit ORDER BY number DESC LIMIT 1), '') THEN "
    "RAISE EXCEPTION 'not the next row of the audit'; END IF; RETURN NEW; END $$",
    "CREATE TRIGGER audit_next BEFORE INSERT ON audit FOR EACH ROW EXECUTE FUNCTION audit_next()",
]


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("previous", sa.Text(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("via", sa.Text(), nullable=False),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit")),
        sa.UniqueConstraint("run", "seq", name=op.f("uq_audit_run_seq")),
    )
    for statement in SQLITE if op.get_bind().dialect.name == "sqlite" else POSTGRES:
        op.execute(statement)
