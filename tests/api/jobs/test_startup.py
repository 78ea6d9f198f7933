"""The database at start: its first API token, who may read its files, and what is said where it cannot be used."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import structlog
from sqlalchemy import select
from support.postgresql import PostgreSQL
from typer.testing import CliRunner

from api.cli.main import app
from api.jobs.database import Database
from api.jobs.settings import ServerSettings
from api.jobs.startup import first_token, open_database
from api.jobs.tables import TokenRow
from api.jobs.tokens import TokenStore
from planner.errors import JobError

TEXT = "0123456789abcdef" * 4


Opened = Callable[..., TokenStore]


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    """Commands that run in this process send its logs to a stream of their own; afterwards they go where they went."""
    before, handlers = structlog.get_config(), logging.getLogger().handlers
    yield
    structlog.configure(**before)
    logging.basicConfig(handlers=handlers, force=True)


@pytest.fixture
def opened() -> Iterator[Opened]:
    """A function that returns the tokens of the database in a folder, opened with settings as a server opens it."""
    with ExitStack() as stack:

        def start(folder: Path, **settings: Any) -> TokenStore:
            return TokenStore(stack.enter_context(closing(open_database(ServerSettings(data_dir=folder, **settings)))))

        yield start


def test_a_database_without_tokens_gets_the_first_one_with_all_rights(tmp_path: Path, opened: Opened) -> None:
    assert not opened(tmp_path).any()
    tokens = opened(tmp_path, first_token=TEXT)
    found = tokens.find(TEXT)
    assert found is not None
    assert found[1] == "admin"
    (token,) = tokens.all()
    assert (token.id, token.name, token.scope) == (found[0], "first", "admin")
    assert tokens.find(TEXT[:-1] + "0") is None
    assert tokens.find(f"sp_{token.id}_{TEXT[:43]}") is None, "the id does not help to guess"


def test_only_a_hash_of_the_first_token_is_stored(tmp_path: Path, opened: Opened) -> None:
    opened(tmp_path, first_token=TEXT)
    for file in tmp_path.iterdir():
        assert TEXT.encode() not in file.read_bytes()
    with closing(Database(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")) as database, database.read() as connection:
        (row,) = connection.execute(select(TokenRow.id, TokenRow.digest)).all()
    assert len(row.digest) == 64
    assert not row.digest.startswith(row.id)


def test_the_first_token_is_never_created_twice(tmp_path: Path, opened: Opened) -> None:
    tokens = opened(tmp_path, first_token=TEXT)
    opened(tmp_path, first_token=TEXT)
    opened(tmp_path, first_token="another-" + TEXT)
    (token,) = tokens.all()
    tokens.revoke(token.id)
    opened(tmp_path, first_token=TEXT)
    assert tokens.find(TEXT) is None, "a revoked token does not come back"
    assert len(tokens.all()) == 1


def test_servers_that_start_at_once_create_one_token(database: Database) -> None:
    store = TokenStore(database)
    barrier = threading.Barrier(4)
    created: list[bool] = []

    def start(number: int) -> None:
        barrier.wait()
        created.append(store.create_first("first", f"{number}{TEXT}"))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(created) == [False, False, False, True]
    assert len(store.all()) == 1


def test_a_token_as_the_service_makes_them_may_be_the_first(tmp_path: Path, opened: Opened) -> None:
    made = opened(tmp_path / "a").create("me", "read")
    assert opened(tmp_path / "b", first_token=made).find(made) == (made.split("_")[1], "admin")


def test_the_first_token_comes_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_token(ServerSettings()) is None
    file = tmp_path / "secret"
    file.write_text(TEXT + "\n")
    monkeypatch.setenv("SHARDPLAN_FIRST_TOKEN_FILE", str(file))
    assert first_token(ServerSettings()) == TEXT
    monkeypatch.setenv("SHARDPLAN_FIRST_TOKEN", TEXT)
    with pytest.raises(JobError, match="given twice"):
        first_token(ServerSettings())
    monkeypatch.delenv("SHARDPLAN_FIRST_TOKEN_FILE")
    assert first_token(ServerSettings()) == TEXT
    assert TEXT not in repr(ServerSettings())


@pytest.mark.parametrize("text", ["", "brief", "a" * 31, "a" * 201, "a " * 20, "ü" * 40])
def test_a_short_or_empty_token_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    for settings in (ServerSettings(first_token=text), ServerSettings(first_token_file=file)):
        with pytest.raises(JobError, match="characters; a token has 32 to 200") as caught:
            first_token(settings)
        assert "openssl rand" in str(caught.value)
        assert not text or text not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="absent cannot be read"):
        first_token(ServerSettings(first_token_file=tmp_path / "absent"))


def test_migrate_creates_the_tables_and_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDPLAN_FIRST_TOKEN", "short")
    refused = CliRunner().invoke(app, ["migrate", "--data-dir", str(tmp_path)])
    assert refused.exit_code == 2
    assert not (tmp_path / "jobs.sqlite3").exists()
    monkeypatch.setenv("SHARDPLAN_FIRST_TOKEN", TEXT)
    done = CliRunner().invoke(app, ["migrate", "--data-dir", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (0, "")
    with closing(Database(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")) as database:
        assert TokenStore(database).find(TEXT) is not None


def modes(folder: Path) -> dict[str, int]:
    """Return the permissions of a folder and of the files in it, by name."""
    return {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}


def test_the_files_are_their_owners_only(tmp_path: Path, opened: Opened) -> None:
    folder = tmp_path / "data"
    opened(folder).create("me", "read")
    found = modes(folder)
    assert {"jobs.sqlite3", "jobs.sqlite3-wal", "jobs.sqlite3-shm"} < set(found)
    assert found.pop("data") == 0o700
    assert set(found.values()) == {0o600}


def test_files_of_an_earlier_version_become_their_owners_only(tmp_path: Path, opened: Opened) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    with closing(Database(f"sqlite:///{folder / 'jobs.sqlite3'}")) as earlier:
        earlier.migrate()
        (folder / "lock").touch()
        assert 0o644 in modes(folder).values()
        opened(folder)
        found = modes(folder)
    assert found.pop("data") == 0o755, "whoever made it decides"
    assert set(found.values()) == {0o600}


COMMANDS = (
    ["serve", "--port", "0"],
    ["migrate"],
    ["token", "create", "me"],
    ["token", "list"],
    ["token", "revoke", "x"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    "content", [b"no database " * 500, b"SQLite format 3\x00" + b"\xff" * 8000], ids=["text", "cut"]
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, command: list[str], content: bytes) -> None:
    file = tmp_path / "jobs.sqlite3"
    file.write_bytes(content)
    done = CliRunner().invoke(app, [*command, "--data-dir", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"shardplan: the database {file} is damaged or no database: ")
    assert "Restore a backup" in line
    assert file.read_bytes() == content


def test_a_file_that_is_damaged_within_is_one_sentence(tmp_path: Path, opened: Opened) -> None:
    tokens = opened(tmp_path)
    for number in range(500):
        tokens.create(f"{number:0200}", "read")
    tokens._database.shrink()
    tokens._database.close()
    file = tmp_path / "jobs.sqlite3"
    content = bytearray(file.read_bytes())
    content[-40_000:-20_000] = b"\xff" * 20_000
    file.write_bytes(content)
    done = CliRunner().invoke(app, ["serve", "--port", "0", "--data-dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "is damaged or no database" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_database_of_a_newer_version_is_one_sentence(tmp_path: Path, command: list[str], opened: Opened) -> None:
    tokens = opened(tmp_path)
    with tokens._database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'v9999'")
    done = CliRunner().invoke(app, [*command, "--data-dir", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "is of a newer version of shardplan (v9999)" in line
    assert "Install the newest shardplan" in line


def test_a_worker_says_so_in_one_sentence(postgresql: PostgreSQL) -> None:
    url = postgresql.create(f"newer{time.time_ns()}")
    with closing(Database(url)) as database:
        database.migrate()
        with database.write() as connection:
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'v9999'")
    newer = CliRunner().invoke(app, ["worker", "--database-url", url])
    away = CliRunner().invoke(app, ["worker", "--database-url", "postgresql://me:secret@127.0.0.1:9/shardplan"])
    for done, said in ((newer, "is of a newer version"), (away, "cannot be opened: ")):
        assert (done.exit_code, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert said in line
        assert "secret" not in line


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for command in (["serve", "--port", "0"], ["migrate"]):
        done = CliRunner().invoke(app, [*command, "--data-dir", str(tmp_path / "file" / "data")])
        assert done.exit_code == 2
        (line,) = done.stderr.splitlines()
        assert "cannot be made" in line


def test_token_commands_make_no_database_where_the_folder_is_mistyped(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    for command in (["token", "create", "me"], ["token", "list"], ["token", "revoke", "x"]):
        done = CliRunner().invoke(app, [*command, "--data-dir", str(absent)])
        assert (done.exit_code, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert f"there is no database in {absent}, which does not exist. Give the --data-dir of" in line
        assert not absent.exists()
    for command in (["token", "list"], ["token", "revoke", "x"]):
        done = CliRunner().invoke(app, [*command, "--data-dir", str(tmp_path)])
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"there is no database in {tmp_path}. " in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_the_first_token_can_be_made_before_the_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = CliRunner().invoke(app, ["token", "create", "me", "--data-dir", str(tmp_path)])
    assert made.exit_code == 0
    assert made.stdout.startswith("sp_")
    assert made.stderr == f"shardplan: a new database is made in {tmp_path}.\n"
    again = CliRunner().invoke(app, ["token", "create", "you", "--data-dir", str(tmp_path)])
    assert (again.exit_code, again.stderr) == (0, "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    default = CliRunner().invoke(app, ["token", "create", "me"])
    assert default.exit_code == 0, "the default folder is made"
    assert modes(tmp_path / "home" / "shardplan")["shardplan"] == 0o700
    listed = CliRunner().invoke(app, ["token", "list", "--data-dir", str(tmp_path)])
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["me", "you"]
