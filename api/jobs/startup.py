"""The service's database, opened and migrated, with the first API token where the settings give one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import structlog
from sqlalchemy.exc import OperationalError

from api.jobs.database import Database
from api.jobs.pg_queue import install
from api.jobs.settings import ServerSettings
from api.jobs.tokens import LEAST_SECRET, MOST_SECRET, TokenStore, is_secret
from planner.errors import JobError

FIRST_NAME = "first"
"""The name of the first token."""


def open_database(settings: ServerSettings) -> Database:
    """Return the database, migrated to this version. If it has no token at all, it gets the settings' first token.

    Raises:
        JobError: the settings' first token is too short, or its file cannot be read. The database does not answer, its
            file is damaged or cannot be made, or a newer version of shardplan has used it.
    """
    token = first_token(settings)
    if settings.database_url is None:
        make_private(settings)
    database = Database(settings.url)
    try:
        database.migrate()
        if database.is_postgresql:
            install(database)
        else:
            database.check_file()
            try:
                database.let_shrink()
            except OperationalError as error:  # it is in use, or the disk has no room for a copy: the next start tries
                structlog.get_logger().warning("the database will not shrink", error=str(error.orig))
        if token is not None:
            TokenStore(database).create_first(FIRST_NAME, token)
    except BaseException:
        database.close()
        raise
    return database


def make_private(settings: ServerSettings) -> None:
    """Make the folder and the file of the SQLite database where there are none, for their owner only, as they remain.

    Raises:
        JobError: they cannot be made.
    """
    make_folder(settings.data_dir)
    file = settings.sqlite_file
    try:
        os.close(os.open(file, os.O_CREAT | os.O_RDONLY, 0o600))
    except OSError as error:
        advice = "Give another --data-dir, or the right to write there."
        raise JobError(f"{file} cannot be made or read: {error.strerror}.", what_to_do=advice) from error
    for path in (file, file.with_name("lock"), *(file.with_name(f"{file.name}-{kind}") for kind in ("wal", "shm"))):
        with suppress(FileNotFoundError, PermissionError):  # not ours: whoever made it decides
            path.chmod(path.stat().st_mode & 0o700)


def make_folder(folder: Path) -> None:
    """Make the folder of a server's files where there is none, for its owner only.

    Raises:
        JobError: it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        advice = "Give another --data-dir."
        raise JobError(f"the folder {folder} cannot be made: {error.strerror}.", what_to_do=advice) from error


def first_token(settings: ServerSettings) -> str | None:
    """Return the text of the first token that the settings give; None: they give none.

    Raises:
        JobError: it is given twice, its file cannot be read, or it is too short or has spaces.
    """
    if settings.first_token is not None and settings.first_token_file is not None:
        advice = "Leave out one of SHARDPLAN_FIRST_TOKEN and SHARDPLAN_FIRST_TOKEN_FILE."
        raise JobError("the first token is given twice.", what_to_do=advice, field="first_token")
    if settings.first_token is not None:
        return _checked(settings.first_token.get_secret_value(), "first_token")
    file = settings.first_token_file
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        advice = "Name a file with the token in it, which the service may read."
        raise JobError(f"first_token_file: {file} cannot be read.", what_to_do=advice, field="first_token") from error
    return _checked(text, f"first_token_file ({file})")


def _checked(text: str, where: str) -> str:
    if is_secret(text):
        return text
    detail = f"{where} has {len(text)} characters; a token has {LEAST_SECRET} to {MOST_SECRET}, without spaces."
    raise JobError(detail, what_to_do="Make one with `openssl rand -hex 32`.", field="first_token")
