"""The service's settings: from options, ``SHARDPLAN_*`` in the environment, a file, or as here, in this order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import platformdirs
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from api.jobs.store import Limits
from api.jobs.supervisor import SolveLimits
from planner.errors import JobError

CONFIG_VARIABLE = "SHARDPLAN_CONFIG"
"""Names the TOML file."""


class ServerSettings(BaseSettings):
    """How ``shardplan serve`` and ``shardplan worker`` run."""

    model_config = SettingsConfigDict(env_prefix="SHARDPLAN_", extra="ignore", frozen=True)

    host: str = "127.0.0.1"
    """The address to listen on; while there are no API tokens, one of this machine's own."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free one, which the log names."""
    data_dir: Path = Field(default_factory=lambda: Path(platformdirs.user_data_dir("shardplan")))
    """Where the database lies, where that is SQLite."""
    database_url: SecretStr | None = None
    """``postgresql://user:password@host/name``; without it SQLite in ``data_dir``."""
    workers: int = Field(default=1, ge=0, le=256)
    """Jobs planned at once, each in its own process; with PostgreSQL, by each ``shardplan worker``. 0: none here."""

    max_body_bytes: int = Field(default=1_000_000, ge=1000)
    """The largest request; configs are a few thousand bytes."""
    max_queued: int = Field(default=1000, ge=1)
    """Jobs that may wait before new ones are turned away."""
    max_unfinished_per_token: int = Field(default=200, ge=1)
    """Jobs of one token that may wait and run (where there are no tokens, of all)."""
    requests_per_s: float = Field(default=50.0, gt=0)
    """Requests that one token may make, on average, of one server process."""
    requests_burst: int = Field(default=200, ge=1)
    """And how many at once."""
    max_streams: int = Field(default=200, ge=1)
    """Event streams that are open at once."""

    job_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds that the search of one job may take; then it gives the best plan so far."""
    job_grace_s: float = Field(default=30.0, ge=0)
    """Seconds more after which the process of a job that still runs is ended."""
    job_memory_bytes: int = Field(default=8_000_000_000, ge=100_000_000)
    """Resident bytes at which the process of a job is ended."""
    lease_s: float = Field(default=15.0, ge=1.0)
    """Seconds without a sign of life after which a worker's job is given to another (PostgreSQL)."""

    keep_days: float = Field(default=30.0, gt=0)
    """Days after which ended jobs, their plans and idempotency keys are deleted."""
    max_kept_per_token: int = Field(default=10_000, ge=1)
    """Most ended jobs of one token; the oldest are deleted first."""

    @field_validator("database_url")
    @classmethod
    def _is_shared(cls, url: SecretStr | None) -> SecretStr | None:
        # The lock that keeps a second server from SQLite's jobs lies in data_dir.
        if url is not None and url.get_secret_value().startswith("sqlite"):
            raise ValueError("SQLite's database lies in data_dir; give that instead")
        return url

    @property
    def url(self) -> str:
        """The database's URL."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.data_dir / 'jobs.sqlite3'}"

    @property
    def limits(self) -> Limits:
        """How many jobs may wait."""
        return Limits(queued=self.max_queued, unfinished_per_owner=self.max_unfinished_per_token)

    @property
    def solve_limits(self) -> SolveLimits:
        """What one solve may take."""
        return SolveLimits(
            time_s=self.job_timeout_s,
            grace_s=self.job_grace_s,
            memory_bytes=self.job_memory_bytes,
            lease_s=self.lease_s,
        )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Add the file that ``SHARDPLAN_CONFIG`` names."""
        file = os.environ.get(CONFIG_VARIABLE)
        if not file:
            return init_settings, env_settings
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=Path(file))


def read_settings(options: dict[str, Any]) -> ServerSettings:
    """Return the settings; ``options`` that are None come from the environment, the file, or have their defaults.

    Raises:
        JobError: a value cannot be, or the file cannot be read.
    """
    file = os.environ.get(CONFIG_VARIABLE)
    if file and not Path(file).is_file():
        raise JobError(f"{CONFIG_VARIABLE} names {file}, which is no file.", what_to_do="Name a TOML file, or none.")
    try:
        return ServerSettings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise JobError(f"{where}: {first['msg']}.", what_to_do="See `shardplan serve --help`.") from error
    except ValueError as error:
        raise JobError(f"{file} cannot be read: {error}.", what_to_do="Write it as TOML.") from error
