"""Requests to a shardplan server, repeated where it is unreachable or busy."""

from __future__ import annotations

import email.utils
import json
import random
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import httpx2

from planner.errors import InfeasibleError, PlannerError

REQUEST_TIMEOUT_S = 60.0
"""Seconds for one request; a server checks a large graph before it answers."""
LONGEST_WAIT_S = 300.0
"""Most seconds between two tries, even if the server's ``Retry-After`` asks for more."""

_RESULTS = {"plan", "result"}
"""Members of a job's answer that may have its result."""
_BUSY = (429, 502, 503, 504)
_FIRST_WAIT_S = 0.25
_LONGEST_OWN_WAIT_S = 8.0


class RemotePlanningError(PlannerError):
    """The server refused, failed, or did not answer.

    Attributes:
        problem: the server's problem details; empty where it sent none.
        job_id: id of the job; None where no job was created.
    """

    title = "The server gave no plan"

    def __init__(
        self, detail: str, *, what_to_do: str = "", problem: dict[str, Any] | None = None, job_id: str | None = None
    ) -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.problem = problem or {}
        self.job_id = job_id


class Connection:
    """A connection to a server for one job. Its requests are idempotent, so they may be repeated.

    Args:
        url: address of the server.
        token: API token, sent with each request; None: none.
        timeout_s: seconds for all requests together; None: no limit.
        retries: how often a request is repeated.
        transport: httpx transport of the requests; None: the network.
        clock: returns seconds.
        wait: sleeps for some seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        timeout_s: float | None,
        retries: int,
        transport: httpx2.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self.job_id: str | None = None
        self._jobs = ""
        self._timeout_s = timeout_s
        self._retries = retries
        self._clock = clock
        self._wait = wait
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._client = httpx2.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_S, headers=headers, transport=transport)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def ask(self, method: str, path: str, *, headers: dict[str, str] | None = None, **content: Any) -> dict[str, Any]:
        """Send a request and return the job in the response, as JSON data.

        Raises:
            RemotePlanningError: the server is unreachable, refuses, or is no shardplan server.
        """
        self._jobs = path if method == "POST" else self._jobs
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                response = self._client.request(
                    method, path, headers=headers, timeout=self._left_s(REQUEST_TIMEOUT_S), **content
                )
            except httpx2.TransportError as error:
                if last:
                    raise self._unreachable(error) from error
                self.pause(_own_wait_s(attempt), str(error) or type(error).__name__)
                continue
            if response.status_code not in _BUSY or last:
                return self._job(response)
            self.pause(_wait_s(response, attempt), f"it answers {response.status_code}")
        raise AssertionError("the last attempt returns or raises")

    def events(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield a job's events until the server ends the stream or the connection fails."""
        timeout = httpx2.Timeout(self._left_s(REQUEST_TIMEOUT_S))
        try:
            with self._client.stream("GET", path, timeout=timeout) as response:
                if response.status_code != 200:
                    return
                for line in response.iter_lines():
                    event = _event(line)
                    if event is not None:
                        yield event
                    self._left_s(REQUEST_TIMEOUT_S)
        except httpx2.TransportError:
            return  # the caller reads the job next, and that request reports what is wrong

    def pause(self, seconds: float, reason: str) -> None:
        """Wait for some seconds.

        Raises:
            RemotePlanningError: the time limit would be exceeded; the message has ``reason`` and the job.
        """
        if self._deadline_s is not None and self._clock() + seconds > self._deadline_s:
            raise self._too_late(reason)
        self._wait(seconds)

    def _left_s(self, most_s: float) -> float:
        if self._deadline_s is None:
            return most_s
        left_s = self._deadline_s - self._clock()
        if left_s <= 0:
            raise self._too_late("no time is left")
        return min(most_s, left_s)

    def _too_late(self, reason: str) -> RemotePlanningError:
        job = "no job was made" if self.job_id is None else f"job {self.job_id}"
        advice = "Ask again." if self.job_id is None else f"The job goes on: GET {self.url}{self._jobs}/{self.job_id}."
        return RemotePlanningError(
            f"{self.url} had no answer after {self._timeout_s:g} s ({job}; {reason}).",
            what_to_do=advice,
            job_id=self.job_id,
        )

    def _unreachable(self, error: httpx2.TransportError) -> RemotePlanningError:
        advice = "Check the address, and that `shardplan serve` runs there."
        about = "" if self.job_id is None else f" (job {self.job_id})"
        detail = f"cannot reach {self.url}{about}: {str(error) or type(error).__name__}."
        return RemotePlanningError(detail, what_to_do=advice, job_id=self.job_id)

    def _job(self, response: httpx2.Response) -> dict[str, Any]:
        advice = "Check that a shardplan server is there."
        try:
            answer = response.json()
        except ValueError as error:
            detail = f"{self.url} answered {response.status_code} with something else than JSON."
            raise RemotePlanningError(detail, what_to_do=advice, job_id=self.job_id) from error
        if response.is_error:
            raise error_from_problem(answer if isinstance(answer, dict) else {}, self.job_id)
        if not isinstance(answer, dict) or not {"id", "status", "error"} <= set(answer) or not _RESULTS & set(answer):
            detail = f"{self.url} answered with something else than a job."
            raise RemotePlanningError(detail, what_to_do=advice, job_id=self.job_id)
        self.job_id = str(answer["id"])
        return answer


def error_from_problem(problem: dict[str, Any], job_id: str | None) -> PlannerError:
    """Return the exception for a server's problem details: an `InfeasibleError` or a `RemotePlanningError`."""
    if problem.get("type") == "urn:shardplan:infeasible-error":
        largest = tuple((str(name), int(nbytes)) for name, nbytes in problem.get("largest_tensors", ()))
        return InfeasibleError(
            problem.get("detail"),
            budget_bytes=problem["budget_bytes"],
            least_bytes=problem.get("least_bytes"),
            bound_bytes=problem.get("bound_bytes"),
            largest_tensors=largest,
            enough=problem.get("enough"),
            what_to_do=problem.get("what_to_do"),
        )
    detail = problem.get("detail") or problem.get("title") or "the server gave no reason."
    advice = str(problem.get("what_to_do", ""))
    return RemotePlanningError(str(detail), what_to_do=advice, problem=problem, job_id=job_id)


def _own_wait_s(attempt: int) -> float:
    # Jitter: clients of a server that restarts should not all retry at the same time.
    longest_s = min(_LONGEST_OWN_WAIT_S, _FIRST_WAIT_S * 2**attempt)
    return random.uniform(longest_s / 2, longest_s)


def _wait_s(response: httpx2.Response, attempt: int) -> float:
    """Return the seconds to wait for a busy server: its ``Retry-After`` (seconds or a date), else `_own_wait_s`."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return min(float(text), LONGEST_WAIT_S)
    try:
        then = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return _own_wait_s(attempt)
    return min(max(then.timestamp() - time.time(), 0.0), LONGEST_WAIT_S)


def _event(line: str) -> dict[str, Any] | None:
    """Return the event in one line of a stream of server-sent events; None where the line has no event."""
    if not line.startswith("data:"):
        return None
    try:
        event = json.loads(line.removeprefix("data:"))
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
