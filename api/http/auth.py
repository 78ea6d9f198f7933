"""Authentication, authorization and rate limits, checked before anything else is done for a request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import HTTPException, Request
from starlette.concurrency import run_in_threadpool

from api.jobs.metrics import Metrics
from api.jobs.tokens import SCOPES, Scope, TokenStore

_LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}
_TOKENS_CHECKED_EVERY_S = 1.0
_MOST_BUCKETS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of a request.

    Attributes:
        owner: id of the caller's token; "" where the server has no tokens and serves its own machine only.
        scope: scope of the token.
    """

    owner: str
    scope: Scope

    def may(self, scope: Scope) -> bool:
        """Return whether the caller's scope includes this one."""
        return SCOPES.index(self.scope) >= SCOPES.index(scope)

    @property
    def sees(self) -> str | None:
        """The owner whose jobs the caller may see; None: the jobs of all owners."""
        return None if self.may("admin") else self.owner


NOBODY = Caller(owner="", scope="admin")


class RateLimit:
    """Token-bucket rate limit per API token and process: ``burst`` requests, refilled at ``per_s`` per second."""

    def __init__(self, *, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_s(self, owner: str, now: float) -> float:
        """Return 0 and count the request, or return the seconds until the owner may send one."""
        with self._lock:
            level, since = self._buckets.get(owner, (float(self._burst), now))
            level = min(float(self._burst), level + (now - since) * self._per_s)
            allowed = level >= 1.0
            if len(self._buckets) >= _MOST_BUCKETS:
                self._buckets.clear()  # bounds the memory; all buckets are full again, which does no harm
            self._buckets[owner] = (level - 1.0 if allowed else level, now)
            return 0.0 if allowed else (1.0 - level) / self._per_s


class Guard:
    """The check of each request's API token, rate limit and scope."""

    def __init__(self, tokens: TokenStore, rate: RateLimit, metrics: Metrics) -> None:
        self._tokens = tokens
        self._rate = rate
        self._metrics = metrics
        self._open_until = 0.0
        self._known: dict[str, tuple[float, asyncio.Task[bool]]] = {}

    async def caller(self, request: Request, scope: Scope) -> Caller:
        """Return the caller of a request.

        Raises:
            HTTPException: 401 without a valid token, 403 without the scope, 429 above the rate limit. Where no token
                exists: 403 if the request was not sent to a loopback name.
        """
        if await self._is_open():
            self._check_host(request)
            return NOBODY
        grant = await self._grant(request)
        if grant is None:
            self._metrics.refused("token")
            raise without_token()
        caller = Caller(owner=grant[0], scope=grant[1])
        wait_s = self._rate.wait_s(caller.owner, time.monotonic())
        if wait_s > 0:
            self._metrics.refused("rate")
            raise HTTPException(429, "Too many requests.", headers={"Retry-After": str(int(wait_s) + 1)})
        if not caller.may(scope):
            self._metrics.refused("scope")
            raise HTTPException(403, f"This token has the scope {caller.scope}; this needs {scope}.")
        return caller

    async def still_knows(self, request: Request) -> bool:
        """Return whether a request that was let in would be now: its token was not revoked, or there is still none.

        The answer is at most a second old, and one for all requests with the same token.
        """
        text, now = request.headers.get("authorization", ""), time.monotonic()
        if text not in self._known or now - self._known[text][0] > _TOKENS_CHECKED_EVERY_S:
            # Only what is recent stays, so that this does not grow.
            recent = {key: known for key, known in self._known.items() if now - known[0] <= _TOKENS_CHECKED_EVERY_S}
            self._known = recent | {text: (now, asyncio.create_task(self._knows(request)))}
        return await asyncio.shield(self._known[text][1])  # a client that goes does not end the query of the others

    async def _knows(self, request: Request) -> bool:
        return await self._is_open() or await self._grant(request) is not None

    async def _grant(self, request: Request) -> tuple[str, Scope] | None:
        """Return id and scope of the token that a request gives; None where it gives no valid one."""
        kind, _, text = request.headers.get("authorization", "").partition(" ")
        return await run_in_threadpool(self._tokens.find, text.strip()) if kind.lower() == "bearer" else None

    async def _is_open(self) -> bool:
        """Return whether no token exists; query the database at most once a second, and no more once a token exists."""
        if time.monotonic() < self._open_until:
            return True
        if self._open_until < 0 or await run_in_threadpool(self._tokens.any):
            self._open_until = -1.0
            return False
        self._open_until = time.monotonic() + _TOKENS_CHECKED_EVERY_S
        return True

    def _check_host(self, request: Request) -> None:
        # Against DNS rebinding: a web page could reach a server on this machine under a host name of its own.
        host = request.headers.get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in _LOOPBACK:
            self._metrics.refused("host")
            raise HTTPException(403, "A server without API tokens answers to the names of its own machine only.")


def without_token() -> HTTPException:
    """Return the answer to a request that has no valid token."""
    challenge = {"WWW-Authenticate": 'Bearer realm="shardplan"'}
    return HTTPException(401, "This needs a valid API token: Authorization: Bearer sp_...", headers=challenge)


def needs(scope: Scope) -> Callable[[Request], Awaitable[Caller]]:
    """Return the FastAPI dependency of a route that needs ``scope``; its value is the `Caller`."""

    async def caller(request: Request) -> Caller:
        return await caller_of(request, scope)

    return caller


async def caller_of(request: Request, scope: Scope) -> Caller:
    """Return the caller of a request to a route that needs ``scope``, checked once for each request.

    Raises:
        HTTPException: as `Guard.caller` does.
    """
    known: Caller | None = getattr(request.state, "caller", None)
    if known is None:
        guard: Guard = request.app.state.service.guard
        known = request.state.caller = await guard.caller(request, scope)
    return known
