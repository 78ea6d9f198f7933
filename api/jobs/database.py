"""The database behind a URL: connections to SQLite or PostgreSQL, transactions, its clock, and its migrations."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psycopg
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
from sqlalchemy.exc import ArgumentError, DatabaseError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.types import TypeEngine

from planner.errors import JobError

UNREACHABLE = (OperationalError, InterfaceError, PoolTimeout, ConnectorException)
"""Exceptions of a database that does not answer, is locked or has no room. Any other one is a bug of shardplan."""

_STATEMENT_S, _MIGRATION_S = 20.0, 600.0
"""Seconds after which PostgreSQL gives up a statement, and one of a migration or that waits for another's."""

_ANSWER_S = 5.0
"""Further seconds that it has to answer: where it is frozen, or the network swallows all, it gives up nothing."""

_TCP = {"connect_timeout": 5, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
_TCP |= {"tcp_user_timeout": 15_000}

_ROOM_BYTES, _PROBE_BYTES = 16_000_000, 65_536
"""Bytes that must be free on the disk of a SQLite database, and bytes that are written to it to try it."""

_LOG_BYTES = 16_000_000
_CACHE_KB = 512  # of each connection, of which there are dozens
_PAGES_AT_ONCE = 4000

_MIGRATIONS = Path(__file__).parent / "migrations"
_FIRST_VERSION = "v0001"
_MIGRATION_LOCK = 7_301_866_052_714_002
_SECONDS: TypeEngine[float] = Float(53)
_Result = TypeVar("_Result")


class AnsweringConnection(psycopg.Connection[Any]):
    """A connection to PostgreSQL that is closed, with an `OperationalError`, where an answer does not come in time."""

    answer_s = _STATEMENT_S + _ANSWER_S
    """Seconds that any one statement may take."""

    def wait(self, gen: Generator[Any, Any, _Result], *arguments: Any, **options: Any) -> _Result:
        """Run an exchange with the server, and return its result."""
        return super().wait(self._in_time(gen), *arguments, **options)

    def _in_time(self, exchange: Generator[Any, Any, _Result]) -> Generator[Any, Any, _Result]:
        since = time.monotonic()
        try:
            ready = yield next(exchange)
            while True:
                if not ready and time.monotonic() - since > self.answer_s:
                    self.close()
                    raise psycopg.OperationalError(f"PostgreSQL did not answer within {self.answer_s:g} s")
                ready = yield exchange.send(ready)
        except StopIteration as end:
            result: _Result = end.value
            return result


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
            chosen = {**_TCP, "application_name": "shardplan"}
            self.connect_options: dict[str, Any] = {k: v for k, v in chosen.items() if k not in parsed.query}
            options |= {"pool_pre_ping": True, "pool_recycle": 1800}
        else:
            self.connect_options = {"timeout": 30}
        self.engine = create_engine(parsed, connect_args=self.connect_options, **options)
        self._reading = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        if self.is_postgresql:
            event.listen(self.engine, "do_connect", _connect_postgresql)
        else:
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

    def size_of(self, column: Any) -> ColumnElement[int]:
        """Return the SQL expression for the bytes of a column of JSON text, which is ASCII."""
        return func.octet_length(column) if self.is_postgresql else func.length(column)

    def insert_new(self, table: Any, **values: Any) -> Insert:
        """Return the statement that inserts a row, unless a row with one of its unique keys exists."""
        if self.is_postgresql:
            return postgresql.insert(table).values(**values).on_conflict_do_nothing()
        return sqlite.insert(table).values(**values).on_conflict_do_nothing()

    def migrate(self) -> None:
        """Migrate the tables to this version. A database of the first version, without migrations, keeps its jobs.

        Raises:
            JobError: the database does not answer, its file is damaged, or a newer version of shardplan has used it;
                all connections are closed.
        """
        try:
            with self.write() as connection, _unhurried(connection):
                # Several processes may start at once on one PostgreSQL; the lock makes them wait for each other.
                if self.is_postgresql:
                    connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
                revision = MigrationContext.configure(connection).get_current_revision()
                if revision is not None and revision not in _known_revisions():
                    advice = "Install the newest shardplan, or give another database."
                    raise JobError(f"{self._name} is of a newer version of shardplan ({revision}).", what_to_do=advice)
                config = _alembic()
                config.attributes["connection"] = connection
                tables = set(inspect(connection).get_table_names())
                if "jobs" in tables and "alembic_version" not in tables:
                    command.stamp(config, _FIRST_VERSION)
                command.upgrade(config, "head")
        except JobError:
            self.close()
            raise
        except UNREACHABLE as error:
            self.close()
            advice = "Start it, or give another." if self.is_postgresql else "See whether its folder can be written to."
            raise JobError(f"{self._name} cannot be opened: {_reason(error)}.", what_to_do=advice) from error
        except DatabaseError as error:
            self.close()
            if self.is_postgresql or type(error) is not DatabaseError:
                raise
            raise self._damaged(_reason(error)) from error

    def check(self) -> None:
        """Check that the database answers, that its tables are of this version and, of SQLite, that its disk has room.

        Raises:
            JobError: the tables are of another version, or the disk is full.
            OperationalError: the database does not answer.
        """
        with self.read() as connection:
            revision = MigrationContext.configure(connection).get_current_revision()
        head = _known_revisions()[0]
        if revision != head:
            advice = "Start `shardplan serve` of one version only; it brings the tables to its own."
            raise JobError(f"the database's tables are of version {revision}, not {head}.", what_to_do=advice)
        if self._file is not None:
            _check_room(self._file.parent)

    def check_file(self) -> None:
        """Check the whole file of a SQLite database.

        Raises:
            JobError: it is damaged.
        """
        if self.is_postgresql:
            return
        try:
            with self.read() as connection:
                found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        except DatabaseError as error:
            if type(error) is not DatabaseError:
                raise
            found = _reason(error)
        if found != "ok":
            raise self._damaged(" ".join(str(found).split()))

    def may_hold(self, nbytes: int) -> bool:
        """Return whether there may be more than ``nbytes`` of text: where not, nobody need read all to know the sizes.

        PostgreSQL, which compresses texts, and knows their sizes without reading them, always may.
        """
        if self.is_postgresql:
            return True
        with self.read() as connection:
            pages = _pragma(connection, "page_count") - _pragma(connection, "freelist_count")
            return pages * _pragma(connection, "page_size") > nbytes

    def let_shrink(self) -> None:
        """Make a SQLite database of an earlier version such that `shrink` works on it; its file is written anew."""
        if self.is_postgresql:
            return
        with self.read() as connection:
            if _pragma(connection, "auto_vacuum") == 0:
                connection.exec_driver_sql("PRAGMA auto_vacuum = INCREMENTAL")
                connection.exec_driver_sql("VACUUM")

    def shrink(self) -> None:
        """Give the space of deleted rows back to the disk where it is much; PostgreSQL uses it again by itself."""
        if self.is_postgresql:
            return
        with self.read() as connection:
            free = _pragma(connection, "freelist_count")
            if free < _PAGES_AT_ONCE // 4:
                return
            driver = connection.connection.driver_connection
            assert driver is not None
            for _ in range(0, free, _PAGES_AT_ONCE):
                driver.executescript(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})")  # `execute` would do one page
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @property
    def _file(self) -> Path | None:
        return None if self.is_postgresql or not self.engine.url.database else Path(self.engine.url.database)

    @property
    def _name(self) -> str:
        return f"the database {self._file or self.engine.url.set(drivername='postgresql').render_as_string()}"

    def _damaged(self, what: str) -> JobError:
        advice = "Restore a backup of it, or move it away: a new one is then made."
        return JobError(f"{self._name} is damaged or no database: {what}.", what_to_do=advice)


_URL_ADVICE = "Give one such as postgresql://user:password@host/shardplan, or none for SQLite."


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


@cache
def _known_revisions() -> tuple[str, ...]:
    """Return the versions of the tables, the newest first."""
    return tuple(script.revision for script in ScriptDirectory.from_config(_alembic()).walk_revisions())


def _connect_postgresql(dialect: Any, _: object, arguments: Any, options: dict[str, Any]) -> AnsweringConnection:
    connection: AnsweringConnection = AnsweringConnection.connect(*arguments, **options)
    # Not as an option of the connection, which poolers such as PgBouncer refuse.
    connection.execute(f"SET statement_timeout = {_STATEMENT_S * 1000:.0f}")
    connection.commit()
    return connection


@contextmanager
def _unhurried(connection: Connection) -> Iterator[None]:
    """Let the statements of the block take the time of a migration."""
    driver = connection.connection.driver_connection
    if not isinstance(driver, AnsweringConnection):
        yield
        return
    connection.execute(text(f"SET LOCAL statement_timeout = {_MIGRATION_S * 1000:.0f}"))
    driver.answer_s = _MIGRATION_S + _ANSWER_S
    try:
        yield
    finally:
        del driver.answer_s  # the class's again


def _reason(error: Exception) -> str:
    """Return what the driver says, on one line."""
    lines = str(getattr(error, "orig", None) or error).split("\n")
    return " ".join(lines[0].split()).rstrip(".")


def _check_room(folder: Path) -> None:
    """Raise a `JobError` if a write to ``folder`` would fail."""
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as probe:  # the disk may be read-only, or a quota used up
            probe.write(bytes(_PROBE_BYTES))
    except OSError as error:
        raise JobError(f"the database's disk cannot be written to: {error.strerror}.") from error
    if free < _ROOM_BYTES:
        detail = f"the database's disk is full: {free / 1e6:.1f} MB are free, of {_ROOM_BYTES / 1e6:.0f} MB needed."
        raise JobError(detail)


def _pragma(connection: Connection, name: str) -> int:
    return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0)


def _set_up_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # _begin_sqlite begins transactions, not the driver
    pragmas = ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON")
    for pragma in (*pragmas, f"journal_size_limit = {_LOG_BYTES}", f"cache_size = -{_CACHE_KB}"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE takes the write lock at the start: a transaction that has already read could not wait for the lock.
    if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
