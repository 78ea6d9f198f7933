"""Idempotency keys: a request that is sent again with the same ``Idempotency-Key`` gets the job of the first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import and_, delete, select, update

from api.jobs.database import Database
from api.jobs.tables import KeyRow
from planner.errors import PlannerError

_NONE_YET = ""
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


class IdempotencyError(PlannerError):
    """A malformed key, or one that was used for another request."""

    title = "The Idempotency-Key cannot be used"


@dataclass(slots=True)
class UsedKey:
    """The idempotency key of a request.

    Attributes:
        job_id: id of the job that the request created; None until there is one.
    """

    job_id: str | None


class IdempotencyKeys:
    """The idempotency keys of all owners, in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @contextmanager
    def used(self, owner: str, key: str, digest: str) -> Iterator[UsedKey]:
        """Reserve a key while the block creates the request's job and sets its id in the `UsedKey` that is yielded.

        If the key was used before for the same request, the `UsedKey` has the id of that job. If the block raises, a
        key that has no job yet is released.

        Args:
            owner: owner of the request.
            key: the key that the client sent.
            digest: SHA-256 of the request's body, in hexadecimal.

        Raises:
            IdempotencyError: the key is malformed, or was used for a request with another digest.
        """
        if not _KEY.fullmatch(key):
            raise IdempotencyError("a key has 1 to 255 visible ASCII characters.", what_to_do="Send a UUID.")
        own_key = and_(KeyRow.owner == owner, KeyRow.key == key)
        row = {"owner": owner, "key": key, "digest": digest, "job_id": _NONE_YET, "used_at": self._database.now()}
        with self._database.write() as connection:
            # Insert before select: of two concurrent requests, the second sees the row of the first.
            connection.execute(self._database.insert_new(KeyRow, **row))
            key_row = connection.execute(select(KeyRow.digest, KeyRow.job_id).where(own_key)).one()
        if key_row.digest != digest:
            raise IdempotencyError("this key was used for another request.", what_to_do="Send a new key.")
        used_key = UsedKey(job_id=key_row.job_id or None)
        try:
            yield used_key
        except BaseException:
            with self._database.write() as connection:
                connection.execute(delete(KeyRow).where(own_key, KeyRow.job_id == _NONE_YET))
            raise
        if used_key.job_id is not None and used_key.job_id != key_row.job_id:
            statement = update(KeyRow).where(own_key, KeyRow.job_id == key_row.job_id).values(job_id=used_key.job_id)
            with self._database.write() as connection:
                connection.execute(statement)
