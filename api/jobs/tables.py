"""The tables, the same in SQLite and in PostgreSQL. Times are seconds since 1970, by the database's clock."""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, ForeignKey, Index, Integer, String, Text, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

_Number = BigInteger().with_variant(Integer(), "sqlite")  # SQLite autoincrements INTEGER columns only
_Seconds = Float(53)


class Base(DeclarativeBase):
    """The declarative base of the tables."""


class JobRow(Base):
    """A request of one owner and its status; its result is in `PlanRow`, which equal requests share."""

    __tablename__ = "jobs"

    number: Mapped[int] = mapped_column(_Number, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    owner: Mapped[str] = mapped_column(String(32))
    fingerprint: Mapped[str] = mapped_column(String(64), index=True)
    kind: Mapped[str] = mapped_column(String(16), server_default="plan")
    status: Mapped[str] = mapped_column(String(16))
    request: Mapped[str] = mapped_column(Text)
    label: Mapped[str] = mapped_column(String(400))
    error: Mapped[str | None] = mapped_column(Text)
    attempt: Mapped[int]
    deaths: Mapped[int]
    worker: Mapped[str | None] = mapped_column(String(200))
    lease_until: Mapped[float | None] = mapped_column(_Seconds)
    queued_at: Mapped[float] = mapped_column(_Seconds)
    started_at: Mapped[float | None] = mapped_column(_Seconds)
    finished_at: Mapped[float | None] = mapped_column(_Seconds)

    __table_args__ = (
        UniqueConstraint("owner", "fingerprint", name="uq_jobs_owner_fingerprint"),
        Index("ix_jobs_status_queued_at", "status", "queued_at"),
        # Equal requests of two owners are never planned at the same time: the second gets the first one's plan.
        Index(
            "uq_jobs_running_fingerprint",
            "fingerprint",
            unique=True,
            sqlite_where=text("status = 'running'"),
            postgresql_where=text("status = 'running'"),
        ),
    )


class PlanRow(Base):
    """The result that answers all requests of a fingerprint: a plan, the rows of a comparison, an explanation."""

    __tablename__ = "plans"

    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    plan: Mapped[str] = mapped_column(Text)
    made_at: Mapped[float] = mapped_column(_Seconds)


class EventRow(Base):
    """An event of a job; ``data`` is a JSON object with a ``stage``."""

    __tablename__ = "events"

    number: Mapped[int] = mapped_column(_Number, primary_key=True, autoincrement=True)
    job_number: Mapped[int] = mapped_column(_Number, ForeignKey("jobs.number", ondelete="CASCADE"), index=True)
    data: Mapped[str] = mapped_column(Text)


class KeyRow(Base):
    """A used ``Idempotency-Key``: ``digest`` is the SHA-256 of the request, ``job_id`` its job ("" until it exists)."""

    __tablename__ = "idempotency_keys"

    owner: Mapped[str] = mapped_column(String(32), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(String(32))
    used_at: Mapped[float] = mapped_column(_Seconds)


class TokenRow(Base):
    """An API token: ``digest`` is the SHA-256 of its secret, which is not stored."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    digest: Mapped[str] = mapped_column(String(64))
    scope: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float] = mapped_column(_Seconds)
    revoked_at: Mapped[float | None] = mapped_column(_Seconds)
