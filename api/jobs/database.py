"""The database behind a URL: connections to SQLite or PostgreSQL, transactions, its clock, and its migrations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from procrastinate.exceptions import ConnectorException
from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    Insert,
    create_engine,
    event,
    func,
    inspect,
    literal_column,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.types import TypeEngine

from planner.errors import JobError

UNREACHABLE = (OperationalError, InterfaceError, PoolTimeout, ConnectorException)
"""Exceptions of a database that does not answer, is locked or has no room. Any other one is a bug of shardplan."""

_MIGRATIONS = Path(__file__).parent / "migrations"
_FIRST_VERSION = "v0001"
_MIGRATION_LOCK = 7_301_866_052_714_002
_SECONDS: TypeEngine[float] = Float(53)


class Database:
    """A SQLite or PostgreSQL database. `read` sees committed rows; `write` is one transaction. Both are thread-safe."""

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise JobError("the database URL cannot be read.", what_to_do=_URL_ADVICE, field="database_url") from error
        backend = parsed.get_backend_name()
        if backend not in {"sqlite", "postgresql"}:
            detail = f"there is no support for {backend} as a database."
            raise JobError(detail, what_to_do=_URL_ADVICE, field="database_url")
        self.is_postgresql = backend == "postgresql"
        self.url = parsed.set(drivername="postgresql" if self.is_postgresql else "sqlite").render_as_string(False)
        options: dict[str, Any] = {"pool_size": 10, "max_overflow": 30, "pool_timeout": 10}
        if self.is_postgresql:
            parsed = parsed.set(drivername="postgresql+psycopg")
            connect: dict[str, Any] = {"connect_timeout": 5, "application_name": "shardplan"}
            options |= {"pool_pre_ping": True, "pool_recycle": 1800}
        else:
            connect = {"timeout": 30}
        self.engine = create_engine(parsed, connect_args=connect, **options)
        self._reading = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        if not self.is_postgresql:
            event.listen(self.engine, "connect", _set_up_sqlite)
            event.listen(self.engine, "begin", _begin_sqlite)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Yield a connection in autocommit mode."""
        with self._reading.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Yield a connection in a transaction, which is rolled back where the block raises."""
        with self.engine.begin() as connection:
            yield connection

    def now(self) -> ColumnElement[float]:
        """Return the SQL expression for the seconds since 1970 by the database's clock; machines' clocks may differ."""
        if self.is_postgresql:
            return func.extract("epoch", func.clock_timestamp()).cast(_SECONDS)
        return literal_column("((julianday('now') - 2440587.5) * 86400.0)", _SECONDS)

    def insert_new(self, table: Any, **values: Any) -> Insert:
        """Return the statement that inserts a row, unless a row with one of its unique keys exists."""
        if self.is_postgresql:
            return postgresql.insert(table).values(**values).on_conflict_do_nothing()
        return sqlite.insert(table).values(**values).on_conflict_do_nothing()

    def migrate(self) -> None:
        """Migrate the tables to this version. A database of the first version, without migrations, keeps its jobs."""
        # Several processes may start at once on one PostgreSQL; the lock makes them wait for each other.
        with self.write() as connection:
            if self.is_postgresql:
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
            config = _alembic()
            config.attributes["connection"] = connection
            tables = set(inspect(connection).get_table_names())
            if "jobs" in tables and "alembic_version" not in tables:
                command.stamp(config, _FIRST_VERSION)
            command.upgrade(config, "head")

    def check(self) -> None:
        """Check that the database answers and that its tables are of this version.

        Raises:
            JobError: the tables are of another version.
            OperationalError: the database does not answer.
        """
        with self.read() as connection:
            revision = MigrationContext.configure(connection).get_current_revision()
        head = ScriptDirectory.from_config(_alembic()).get_current_head()
        if revision != head:
            advice = "Start `shardplan serve` of one version only; it brings the tables to its own."
            raise JobError(f"the database's tables are of version {revision}, not {head}.", what_to_do=advice)


_URL_ADVICE = "Give one such as postgresql://user:password@host/shardplan, or none for SQLite."


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _set_up_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # _begin_sqlite begins transactions, not the driver
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE takes the write lock at the start: a transaction that has already read could not wait for the lock.
    if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
