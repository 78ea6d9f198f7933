"""The kind of a job; all earlier jobs are plans."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0003"
down_revision = "v0002"


def upgrade() -> None:
    """Add the column. Its default also serves servers of the earlier version that still run."""
    op.add_column("jobs", sa.Column("kind", sa.String(16), nullable=False, server_default="plan"))
