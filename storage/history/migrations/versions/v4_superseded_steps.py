"""Steps that a run lost when it went back to a checkpoint."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v4"
down_revision = "v3"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "superseded_steps",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("grad_norm", sa.Double(), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("step_s", sa.Double(), nullable=True),
        sa.Column("exposed_sync_s", sa.Double(), nullable=True),
        sa.Column("samples", sa.Text(), nullable=False),
        sa.Column("replica_step_s", sa.Text(), nullable=False),
        sa.Column("rolled_back_seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run", "seq", name=op.f("pk_superseded_steps")),
    )
    op.create_index(
        op.f("ix_superseded_steps_run_step"), "superseded_steps", ["run", "step"], unique=False
    )
