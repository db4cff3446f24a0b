"""Alembic runs this for `storage.history.schema.upgrade`, on the connection given to it."""

from __future__ import annotations

from alembic import context

from storage.history.tables import METADATA

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("migrations run through storage.history.schema.upgrade")
context.configure(
    connection=connection,
    target_metadata=METADATA,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
