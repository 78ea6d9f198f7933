"""An in-memory cache of responses to plan requests, by owner and by the exact bytes of the request.

The response of a job that has succeeded is served for a minute without a database query. It never changes, as only
results that a time limit cut short are searched again (``refresh``), and those are not cached.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

_KEPT_S = 60.0
_MOST_BYTES = 64_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A cached response: the id of its job, its body, and its expiry in seconds of ``time.monotonic()``."""

    job_id: str
    body: bytes
    until: float


class Answers:
    """The most recently used responses, at most ``most_bytes`` bytes of them, by owner and request."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[str, bytes], Answer] = OrderedDict()
        self._nbytes = 0

    def get(self, owner: str, request: bytes) -> Answer | None:
        """Return the cached response to the body ``request``; None where there is none."""
        key = owner, hashlib.sha256(request).digest()
        with self._lock:
            answer = self._answers.get(key)
            if answer is None or answer.until < time.monotonic():
                return None
            self._answers.move_to_end(key)
            return answer

    def put(self, owner: str, request: bytes, job_id: str, body: bytes) -> None:
        """Cache ``body``, which shows job ``job_id``, as the response to the body ``request`` for 60 s."""
        key = owner, hashlib.sha256(request).digest()
        with self._lock:
            old = self._answers.pop(key, None)
            self._nbytes += len(body) - (0 if old is None else len(old.body))
            self._answers[key] = Answer(job_id=job_id, body=body, until=time.monotonic() + _KEPT_S)
            while self._nbytes > self._most_bytes:
                _, dropped = self._answers.popitem(last=False)
                self._nbytes -= len(dropped.body)
