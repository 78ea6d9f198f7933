"""The service's database, opened and migrated, with the first API token where the settings give one."""

from __future__ import annotations

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
        JobError: the settings' first token is too short, or its file cannot be read.
    """
    token = first_token(settings)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    database = Database(settings.url)
    try:
        database.migrate()
        if database.is_postgresql:
            install(database)
        if token is not None:
            TokenStore(database).create_first(FIRST_NAME, token)
    except BaseException:
        database.close()
        raise
    return database


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
