"""Alembic's entry: runs the versions on the connection that `Database.migrate` opened, in its transaction."""

from __future__ import annotations

from alembic import context

from api.jobs.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
context.run_migrations()
