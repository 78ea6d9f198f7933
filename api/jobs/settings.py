"""The service's settings: from options, else ``SHARDPLAN_*`` in the environment, else a file, else the defaults."""

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
"""The environment variable with the path of the TOML file."""


class ServerSettings(BaseSettings):
    """The settings of ``shardplan serve`` and ``shardplan worker``."""

    model_config = SettingsConfigDict(env_prefix="SHARDPLAN_", extra="ignore", frozen=True)

    host: str = "127.0.0.1"
    """The address to listen on; while no API token exists, it must be a loopback address."""
    port: int = Field(default=8000, ge=0, le=65535)
    """The port to listen on; 0 takes a free one, which the log names."""
    data_dir: Path = Field(default_factory=lambda: Path(platformdirs.user_data_dir("shardplan")))
    """The folder of the SQLite database and of its lock."""
    database_url: SecretStr | None = None
    """``postgresql://user:password@host/name``; None: SQLite in ``data_dir``."""
    workers: int = Field(default=1, ge=0, le=256)
    """Jobs planned at once, in a process each, by the server (SQLite) or by each worker (PostgreSQL). 0: none here.

    While as many run, one more may, of a token that has none running.
    """

    first_token: SecretStr | None = None
    """The text of an API token with all rights, created where the database has no token at all; None: none is."""
    first_token_file: Path | None = None
    """The file that holds this text, as Docker and Kubernetes give secrets."""

    max_body_bytes: int = Field(default=1_000_000, ge=1000)
    """Bytes of the largest request body that is accepted; model configs have a few thousand."""
    max_queued: int = Field(default=1000, ge=1)
    """Most jobs that may wait; further jobs are refused."""
    max_unfinished_per_token: int = Field(default=200, ge=1)
    """Most jobs of one token that may wait or run; without tokens, of all clients together."""
    requests_per_s: float = Field(default=50.0, gt=0)
    """Requests per second that one token may send to one server process on average."""
    requests_burst: int = Field(default=200, ge=1)
    """Requests that one token may send to one server process at once."""
    max_streams: int = Field(default=200, ge=1)
    """Most event streams that one server process has open."""

    job_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for the search of one job, which then returns its incumbent."""
    job_grace_s: float = Field(default=30.0, ge=0)
    """Further seconds after which the process of a job that still runs is killed."""
    job_memory_bytes: int = Field(default=8_000_000_000, ge=100_000_000)
    """Resident bytes above which the process of a job is killed."""
    lease_s: float = Field(default=15.0, ge=1.0)
    """Seconds without a renewal after which a worker counts as dead and its job is requeued (PostgreSQL)."""

    keep_days: float = Field(default=30.0, gt=0)
    """Days after which ended jobs, their plans and idempotency keys are deleted."""
    max_kept_per_token: int = Field(default=10_000, ge=1)
    """Most ended jobs of one token; the oldest are deleted first."""
    max_kept_bytes_per_token: int = Field(default=1_000_000_000, ge=1_000_000)
    """Most bytes of requests and results of the ended jobs of one token; the oldest are deleted first."""

    @field_validator("database_url")
    @classmethod
    def _is_shared(cls, url: SecretStr | None) -> SecretStr | None:
        # The lock against a second server on the same SQLite database is a file in data_dir.
        if url is not None and url.get_secret_value().startswith("sqlite"):
            raise ValueError("SQLite's database lies in data_dir; give that instead")
        return url

    @property
    def url(self) -> str:
        """The database's URL."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.sqlite_file}"

    @property
    def sqlite_file(self) -> Path:
        """The file of the SQLite database, where that is the database."""
        return self.data_dir / "jobs.sqlite3"

    @property
    def limits(self) -> Limits:
        """The limits on the number of waiting and running jobs."""
        return Limits(queued=self.max_queued, unfinished_per_owner=self.max_unfinished_per_token)

    @property
    def solve_limits(self) -> SolveLimits:
        """The limits on the time and the memory of one job."""
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
        """Return the sources by precedence: arguments, environment, and the file that ``SHARDPLAN_CONFIG`` names."""
        file = os.environ.get(CONFIG_VARIABLE)
        if not file:
            return init_settings, env_settings
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=Path(file))


def read_settings(options: dict[str, Any]) -> ServerSettings:
    """Return the settings; ``options`` that are None come from the environment, else the file, else the defaults.

    Raises:
        JobError: a value is invalid, or the file cannot be read.
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
