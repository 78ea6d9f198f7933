"""The server's settings: from the command line, or from ``SHARDPLAN_*`` in the environment, or as here."""

from __future__ import annotations

from pathlib import Path

import platformdirs
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ServerSettings(BaseSettings):
    """How ``shardplan serve`` runs."""

    model_config = SettingsConfigDict(env_prefix="SHARDPLAN_", extra="ignore", frozen=True)

    host: str = "127.0.0.1"
    """The address to listen on; the service asks nobody who they are, so anything wider is a decision."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free one, which the log names."""
    data_dir: Path = Field(default_factory=lambda: Path(platformdirs.user_data_dir("shardplan")))
    """Where the database lies."""
    workers: int = Field(default=1, ge=1, le=256)
    """Jobs that are planned at once, each in a process of its own."""
    max_body_bytes: int = Field(default=1_000_000, ge=1000)
    """The largest request; configs are a few thousand bytes."""
    max_queued: int = Field(default=1000, ge=1)
    """Jobs that may wait before new ones are turned away."""
    job_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a job that still runs is ended and failed."""
