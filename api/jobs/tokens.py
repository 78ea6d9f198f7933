"""API tokens: ``sp_ID_SECRET``. The database stores the SHA-256 of the secret, not the secret.

The secret has 256 random bits, so a fast hash is safe from a search, and checking a request takes microseconds. The
first token may be a text of the operator's own, with a hash of it as its id.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from sqlalchemy import exists, func, insert, select, update

from api.jobs.database import Database
from api.jobs.tables import TokenRow
from planner.errors import JobError

Scope = Literal["read", "plan", "admin"]
""""read": read the token's own jobs; "plan": also submit and cancel them; "admin": also read and cancel all jobs."""

SCOPES: tuple[Scope, ...] = get_args(Scope)

LEAST_SECRET, MOST_SECRET = 32, 200
"""Limits on the characters of a token that the operator chose."""

_TOKEN = re.compile(r"sp_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_OWN = re.compile(rf"[!-~]{{{LEAST_SECRET},{MOST_SECRET}}}")
_FIRST_LOCK = 7_301_866_052_714_003


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token without its secret; times in seconds since 1970."""

    id: str
    name: str
    scope: Scope
    created_at: float
    revoked_at: float | None


class TokenStore:
    """The tokens in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, scope: str) -> str:
        """Return the text of a new token. It cannot be read again.

        Raises:
            JobError: there is no such scope, or the name is empty or too long.
        """
        if scope not in SCOPES:
            raise JobError(f"there is no scope {scope!r}.", what_to_do=f"Choose one of {', '.join(SCOPES)}.")
        if not 1 <= len(name) <= 200 or not name.isprintable():
            raise JobError("a token's name has 1 to 200 printable characters.", what_to_do="Give another.")
        token_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        row = {"id": token_id, "name": name, "digest": _digest(secret), "scope": scope}
        with self._database.write() as connection:
            connection.execute(insert(TokenRow).values(**row, created_at=self._database.now()))
        return f"sp_{token_id}_{secret}"

    def create_first(self, name: str, text: str) -> bool:
        """Create the token ``text`` with all rights, unless any token exists, revoked ones included.

        Returns:
            Whether the token was created.
        """
        parsed = _parse(text)
        assert parsed is not None, "whoever calls has checked the text"
        token_id, secret = parsed
        row = {"id": token_id, "name": name, "digest": _digest(secret), "scope": "admin"}
        with self._database.write() as connection:
            if self._database.is_postgresql:  # several servers may start at once
                connection.execute(select(func.pg_advisory_xact_lock(_FIRST_LOCK)))
            if connection.scalar(select(exists(select(TokenRow.id)))):
                return False
            connection.execute(insert(TokenRow).values(**row, created_at=self._database.now()))
        return True

    def revoke(self, token_id: str) -> Token:
        """Revoke a token and return it; requests with it are refused from now on.

        Raises:
            JobError: there is no token of this id.
        """
        valid = update(TokenRow).where(TokenRow.id == token_id, TokenRow.revoked_at.is_(None))
        with self._database.write() as connection:
            connection.execute(valid.values(revoked_at=self._database.now()))
        for token in self.all():
            if token.id == token_id:
                return token
        raise JobError(f"there is no token {token_id!r}.", what_to_do="`shardplan token list` lists them.")

    def all(self) -> Sequence[Token]:
        """Return all tokens, revoked ones included, the oldest first."""
        columns = (TokenRow.id, TokenRow.name, TokenRow.scope, TokenRow.created_at, TokenRow.revoked_at)
        with self._database.read() as connection:
            rows = connection.execute(select(*columns).order_by(TokenRow.created_at)).all()
        return [Token(**row._mapping) for row in rows]

    def any(self) -> bool:
        """Return whether any token exists, revoked ones included. If one does, every request needs a token."""
        with self._database.read() as connection:
            return bool(connection.scalar(select(exists(select(TokenRow.id)))))

    def find(self, text: str) -> tuple[str, Scope] | None:
        """Return the id and scope of the token with this text; None where there is no such token, or it was revoked."""
        parsed = _parse(text)
        if parsed is None:
            return None
        token_id, secret = parsed
        statement = select(TokenRow.digest, TokenRow.scope, TokenRow.revoked_at).where(TokenRow.id == token_id)
        with self._database.read() as connection:
            row = connection.execute(statement).one_or_none()
        if row is None or not hmac.compare_digest(row.digest, _digest(secret)) or row.revoked_at is not None:
            return None
        return token_id, cast(Scope, row.scope)


def is_secret(text: str) -> bool:
    """Return whether ``text`` may be a token: printable ASCII without spaces, within the limits on its length."""
    return _parse(text) is not None


def _parse(text: str) -> tuple[str, str] | None:
    """Return the id and the secret of a token's text; None where it cannot be one."""
    match = _TOKEN.fullmatch(text)
    if match is not None:
        return match[1], match[2]
    return (_digest(f"id {text}")[:16], text) if _OWN.fullmatch(text) else None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
