"""Sums of steps per minute and hour, filled from the steps that are there; notes and tags."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v2"
down_revision = "v1"
branch_labels = None
depends_on = None

SPANS_S = (60, 3600)
FILL = """
INSERT INTO rollups (run, span_s, begin, generation, num_steps, first_step, last_step, tokens,
                     step_s, exposed_sync_s, num_losses, loss_sum)
SELECT run, {span}, CAST(FLOOR("at" / {span}) AS BIGINT) * {span} AS began, generation,
       COUNT(*), MIN(step), MAX(step), SUM(tokens), COALESCE(SUM(step_s), 0),
       COALESCE(SUM(exposed_sync_s), 0), COUNT(loss), COALESCE(SUM(loss), 0)
FROM steps GROUP BY run, began, generation
"""


def upgrade() -> None:
    op.create_table(
        "rollups",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("span_s", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("begin", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("num_steps", sa.BigInteger(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("step_s", sa.Double(), nullable=False),
        sa.Column("exposed_sync_s", sa.Double(), nullable=False),
        sa.Column("num_losses", sa.BigInteger(), nullable=False),
        sa.Column("loss_sum", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run", "span_s", "begin", "generation", name=op.f("pk_rollups")),
    )
    for span in SPANS_S:
        op.execute(FILL.format(span=span))
    op.create_table(
        "notes",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "id", name=op.f("pk_notes")),
    )
    op.create_table(
        "tags",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "tag", name=op.f("pk_tags")),
    )
    op.create_index(op.f("ix_tags_tag"), "tags", ["tag"], unique=False)
