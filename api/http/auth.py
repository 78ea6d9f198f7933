"""Who asks, what they may, and how often: decided before anything else is done for a request."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import HTTPException, Request
from starlette.concurrency import run_in_threadpool

from api.jobs.metrics import Metrics
from api.jobs.tokens import SCOPES, Scope, TokenStore

_LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}
_LOOK_S = 1.0
_MOST_BUCKETS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: ``owner`` is a token's id, or "" where the server has no tokens and serves its own machine only."""

    owner: str
    scope: Scope

    def may(self, scope: Scope) -> bool:
        """Return whether the caller's scope includes this one."""
        return SCOPES.index(self.scope) >= SCOPES.index(scope)

    @property
    def sees(self) -> str | None:
        """The owner whose jobs the caller sees; None: everybody's."""
        return None if self.may("admin") else self.owner


NOBODY = Caller(owner="", scope="admin")


class RateLimit:
    """A bucket of ``burst`` requests for each token, filled again at ``per_s``; in memory, of this process alone."""

    def __init__(self, *, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_s(self, owner: str, now: float) -> float:
        """Return 0 and take one from the owner's bucket, or the seconds until there is one to take."""
        with self._lock:
            level, since = self._buckets.get(owner, (float(self._burst), now))
            level = min(float(self._burst), level + (now - since) * self._per_s)
            allowed = level >= 1.0
            if len(self._buckets) >= _MOST_BUCKETS:
                self._buckets.clear()  # as good as full buckets; only as many tokens as this would ever see it
            self._buckets[owner] = (level - 1.0 if allowed else level, now)
            return 0.0 if allowed else (1.0 - level) / self._per_s


class Guard:
    """Decides who a request is from."""

    def __init__(self, tokens: TokenStore, rate: RateLimit, metrics: Metrics) -> None:
        self._tokens = tokens
        self._rate = rate
        self._metrics = metrics
        self._open_until = 0.0

    async def caller(self, request: Request, scope: Scope) -> Caller:
        """Return who asks.

        Raises:
            HTTPException: 401 without a valid token, 403 where it may not do this, 429 where it asks too often.
        """
        if await self._is_open():
            self._check_host(request)
            return NOBODY
        kind, _, text = request.headers.get("authorization", "").partition(" ")
        found = await run_in_threadpool(self._tokens.find, text.strip()) if kind.lower() == "bearer" else None
        if found is None:
            self._metrics.refused("token")
            challenge = {"WWW-Authenticate": 'Bearer realm="shardplan"'}
            raise HTTPException(401, "This needs a valid API token: Authorization: Bearer sp_...", headers=challenge)
        caller = Caller(owner=found[0], scope=found[1])
        wait_s = self._rate.wait_s(caller.owner, time.monotonic())
        if wait_s > 0:
            self._metrics.refused("rate")
            raise HTTPException(429, "Too many requests.", headers={"Retry-After": str(int(wait_s) + 1)})
        if not caller.may(scope):
            self._metrics.refused("scope")
            raise HTTPException(403, f"This token has the scope {caller.scope}; this needs {scope}.")
        return caller

    async def _is_open(self) -> bool:
        """Return whether there is no token; looked up once a second, and never again once there is one."""
        if time.monotonic() < self._open_until:
            return True
        if self._open_until < 0 or await run_in_threadpool(self._tokens.any):
            self._open_until = -1.0
            return False
        self._open_until = time.monotonic() + _LOOK_S
        return True

    def _check_host(self, request: Request) -> None:
        # A page in a browser on this machine could reach the server under a name of its own making.
        host = request.headers.get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in _LOOPBACK:
            self._metrics.refused("host")
            raise HTTPException(403, "A server without API tokens answers to the names of its own machine only.")


def needs(scope: Scope) -> Callable[[Request], Awaitable[Caller]]:
    """Return the dependency of a route that needs this scope."""

    async def caller(request: Request) -> Caller:
        guard: Guard = request.app.state.service.guard
        return await guard.caller(request, scope)

    return caller
