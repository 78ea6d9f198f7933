"""The first API token, from the settings: created once, stored as a hash, refused where it is too short."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
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
