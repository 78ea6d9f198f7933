"""`JobRecord`: one row of the jobs with its result, and the statements that read such rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, Row, Select, and_, literal, select

from api.jobs.records.results import CUT_SHORT_MARKS, is_cut_short
from api.jobs.tables import JobRow, PlanRow
from api.requests.schemas import JobKind, JobStatus

UNFINISHED = ("queued", "running")
"""Statuses of jobs that have not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One row of the jobs and its result. JSON columns are text, which properties parse. Times: seconds since 1970.

    A job that is searched again keeps its earlier result until a better one replaces it. ``error`` then says, where the
    last search failed, why.
    """

    number: int
    id: str
    owner: str
    fingerprint: str
    kind: JobKind
    status: JobStatus
    attempt: int
    queued_at: float
    started_at: float | None
    finished_at: float | None
    label: str
    request_json: str
    error_json: str | None
    result_json: str | None

    @property
    def request(self) -> dict[str, Any]:
        """The request as JSON data, defaults included."""
        return cast(dict[str, Any], json.loads(self.request_json))

    @property
    def plan(self) -> dict[str, Any] | None:
        """The plan of a job of the kind "plan" that has succeeded, now or before it was queued again; else None."""
        is_plan = self.kind == "plan" and self.result_json is not None
        return cast(dict[str, Any], json.loads(self.result_json or "")) if is_plan else None

    @property
    def error(self) -> dict[str, Any] | None:
        """The problem details of a job that has failed, or whose last search has; else None."""
        return None if self.error_json is None else cast(dict[str, Any], json.loads(self.error_json))

    @property
    def ended(self) -> bool:
        """Whether the job neither waits nor runs."""
        return self.status not in UNFINISHED

    @property
    def may_be_tried_again(self) -> bool:
        """Whether an equal request runs the job again: it was cancelled, or the server failed (status >= 500)."""
        is_failed = self.status == "failed" and (self.error or {}).get("status", 0) >= 500
        return is_failed or self.status == "cancelled"

    @property
    def is_cut_short(self) -> bool:
        """Whether the job has succeeded with a result that a longer search may improve."""
        text = self.result_json or ""
        is_marked = self.status == "succeeded" and any(mark in text for mark in CUT_SHORT_MARKS)
        return is_marked and is_cut_short(json.loads(text))  # a result of megabytes is parsed only if it is needed

    def runs_again(self, *, refresh: bool) -> bool:
        """Return whether an equal request, which may ask for a better result, runs the job again."""
        return self.may_be_tried_again or (refresh and self.is_cut_short)


def job_rows(*, with_result: bool = True, with_request: bool = True) -> Select[Any]:
    """Return the statement that reads jobs as `record_of` takes them; without a result or request they have none."""
    request = JobRow.request if with_request else literal("{}")
    columns = [*(getattr(JobRow, name) for name in _COLUMNS), request.label("request_json")]
    if not with_result:
        return select(*columns, literal(None).label("result_json"))
    # A job that failed or was cancelled has no result, even if an equal job of another owner has one. One that waits or
    # runs has a result only if it is searched again: else it would have ended with the result.
    same = and_(PlanRow.fingerprint == JobRow.fingerprint, JobRow.status.in_(("succeeded", *UNFINISHED)))
    return select(*columns, PlanRow.plan.label("result_json")).outerjoin(PlanRow, same)


_COLUMNS = (
    *("number", "id", "owner", "fingerprint", "kind", "status", "attempt"),
    *("queued_at", "started_at", "finished_at", "label", "error"),
)


def still_running(job: JobRecord) -> Any:
    """Return the condition that a claimed job still runs in its attempt."""
    return and_(JobRow.number == job.number, JobRow.status == "running", JobRow.attempt == job.attempt)


def one_job(connection: Connection, statement: Select[Any]) -> JobRecord | None:
    """Return the job that a statement of `job_rows` selects; None where it selects none."""
    row = connection.execute(statement).one_or_none()
    return None if row is None else record_of(row)


def record_of(row: Row[Any]) -> JobRecord:
    """Return the job in a row of `job_rows`."""
    values = dict(row._mapping)
    return JobRecord(error_json=values.pop("error"), **values)
