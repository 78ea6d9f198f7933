"""Owners, leases, events, tokens, idempotency keys; plans shared by equal requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0002"
down_revision = "v0001"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_SECONDS = sa.Float(53)


def upgrade() -> None:
    """Create the new tables and copy the jobs of the first version into them, with the owner ""."""
    op.rename_table("jobs", "jobs_v0001")
    op.drop_index("ix_jobs_status", "jobs_v0001")
    _create_jobs()
    _create_others()
    op.execute(
        "INSERT INTO plans (fingerprint, plan, made_at) "
        "SELECT fingerprint, plan, finished_at FROM jobs_v0001 WHERE plan IS NOT NULL"
    )
    # Running jobs were interrupted, so they are queued again.
    op.execute(
        "INSERT INTO jobs (id, owner, fingerprint, status, request, label, error, attempt, deaths, queued_at, "
        "started_at, finished_at) SELECT id, '', fingerprint, "
        "CASE status WHEN 'running' THEN 'queued' ELSE status END, request, '', error, 0, 0, queued_at, "
        "started_at, finished_at FROM jobs_v0001 ORDER BY number"
    )
    op.drop_table("jobs_v0001")


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
        _text("id", 32),
        _text("owner", 32),
        _text("fingerprint", 64),
        _text("status", 16),
        sa.Column("request", sa.Text, nullable=False),
        _text("label", 400),
        sa.Column("error", sa.Text),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("deaths", sa.Integer, nullable=False),
        sa.Column("worker", sa.String(200)),
        sa.Column("lease_until", _SECONDS),
        sa.Column("queued_at", _SECONDS, nullable=False),
        sa.Column("started_at", _SECONDS),
        sa.Column("finished_at", _SECONDS),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sa.UniqueConstraint("owner", "fingerprint", name="uq_jobs_owner_fingerprint"),
    )
    op.create_index("ix_jobs_fingerprint", "jobs", ["fingerprint"])
    op.create_index("ix_jobs_status_queued_at", "jobs", ["status", "queued_at"])
    running = sa.text("status = 'running'")
    op.create_index(
        "uq_jobs_running_fingerprint",
        "jobs",
        ["fingerprint"],
        unique=True,
        sqlite_where=running,
        postgresql_where=running,
    )


def _create_others() -> None:
    op.create_table(
        "plans",
        _text("fingerprint", 64, primary_key=True),
        sa.Column("plan", sa.Text, nullable=False),
        sa.Column("made_at", _SECONDS, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("number", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("job_number", _NUMBER, sa.ForeignKey("jobs.number", ondelete="CASCADE"), nullable=False),
        sa.Column("data", sa.Text, nullable=False),
    )
    op.create_index("ix_events_job_number", "events", ["job_number"])
    op.create_table(
        "idempotency_keys",
        _text("owner", 32, primary_key=True),
        _text("key", 255, primary_key=True),
        _text("digest", 64),
        _text("job_id", 32),
        sa.Column("used_at", _SECONDS, nullable=False),
    )
    op.create_table(
        "tokens",
        _text("id", 32, primary_key=True),
        _text("name", 200),
        _text("digest", 64),
        _text("scope", 16),
        sa.Column("created_at", _SECONDS, nullable=False),
        sa.Column("revoked_at", _SECONDS),
    )


def _text(name: str, length: int, *, primary_key: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False, primary_key=primary_key)
