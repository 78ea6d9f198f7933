"""Alembic's entry point: runs the migrations on the connection of `Database.migrate`, in its transaction."""

from __future__ import annotations

from alembic import context

from api.jobs.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
context.run_migrations()
