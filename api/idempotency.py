"""``Idempotency-Key``: a request that is sent again, because its answer got lost, is the request that it was."""

from __future__ import annotations

import re

from sqlalchemy import select

from api.database import Database
from api.tables import KeyRow
from planner.errors import PlannerError

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


class IdempotencyError(PlannerError):
    """A key that cannot be, or that was used for another request."""

    title = "The Idempotency-Key cannot be used"


class IdempotencyKeys:
    """The keys that each owner used, in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def job_of(self, owner: str, key: str, digest: str) -> str | None:
        """Return the id of the job that the key made, or None where it is new.

        Raises:
            IdempotencyError: the key was used for a request of another digest, or is none.
        """
        if not _KEY.fullmatch(key):
            raise IdempotencyError("a key has 1 to 255 visible ASCII characters.", what_to_do="Send a UUID.")
        statement = select(KeyRow.digest, KeyRow.job_id).where(KeyRow.owner == owner, KeyRow.key == key)
        with self._database.read() as connection:
            row = connection.execute(statement).one_or_none()
        if row is None:
            return None
        if row.digest != digest:
            raise IdempotencyError("this key was used for another request.", what_to_do="Send a new key.")
        return str(row.job_id)

    def remember(self, owner: str, key: str, digest: str, job_id: str) -> None:
        """Record that the key made this job."""
        row = {"owner": owner, "key": key, "digest": digest, "job_id": job_id, "used_at": self._database.now()}
        with self._database.write() as connection:
            connection.execute(self._database.insert_new(KeyRow, **row))
