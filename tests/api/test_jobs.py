"""The queue and its workers: what happens to a job when things go right, wrong, and away."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes_for_jobs
import pytest

from api.jobs import JobRunner
from api.store import JobRecord, JobStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    opened = JobStore(tmp_path / "jobs.sqlite3")
    yield opened
    opened.close()


@pytest.fixture
def runner(store: JobStore) -> Iterator[Callable[..., JobRunner]]:
    started: list[JobRunner] = []

    def start(job: Callable[[dict[str, Any]], dict[str, Any]], timeout_s: float = 60.0) -> JobRunner:
        started.append(JobRunner(store, workers=1, timeout_s=timeout_s, job=job))
        started[-1].start()
        return started[-1]

    yield start
    for running in started:
        running.stop()


def until_ended(store: JobStore, job_id: str) -> JobRecord:
    pause = threading.Event()
    for _ in range(600):
        job = store.get(job_id)
        assert job is not None
        if job.status not in {"queued", "running"}:
            return job
        pause.wait(0.05)
    raise AssertionError(f"{job} has not ended")


@pytest.fixture
def pipes(tmp_path: Path) -> dict[str, str]:
    names = {name: str(tmp_path / name) for name in ("started", "released")}
    for path in names.values():
        os.mkfifo(path)
    return names


def test_same_request_is_one_job(store: JobStore) -> None:
    first, second = store.add("f", {"model": "a"}), store.add("f", {"model": "a"})
    assert first.id == second.id
    assert store.counts() == {"queued": 1}


def test_longest_waiting_is_claimed_first_and_once(store: JobStore) -> None:
    ids = [store.add(name, {"model": name}).id for name in "abc"]
    claimed = [store.claim() for _ in range(4)]
    assert [job.id for job in claimed if job is not None] == ids
    assert claimed[3] is None


def test_cancelled_job_stays_cancelled_whatever_its_worker_brings(store: JobStore) -> None:
    job = store.add("f", {})
    store.claim()
    assert store.cancel(job.id)
    store.succeed(job.id, {})
    after = store.get(job.id)
    assert after is not None
    assert (after.status, after.plan) == ("cancelled", None)


@pytest.mark.parametrize(
    ("status", "again"), [(422, "failed"), (500, "queued")], ids=["the request's fault", "the server's fault"]
)
def test_failed_job_is_tried_again_only_where_the_server_was_at_fault(store: JobStore, status: int, again: str) -> None:
    job = store.add("f", {})
    store.claim()
    store.fail(job.id, {"status": status})
    assert store.add("f", {}).status == again


def test_jobs_end_as_their_outcomes_say(store: JobStore, runner: Callable[..., JobRunner]) -> None:
    running = runner(fakes_for_jobs.answer)
    jobs = [store.add(name, {"model": name}) for name in "ab"]
    for _ in jobs:
        running.wake()
    ended = [until_ended(store, job.id) for job in jobs]
    assert [(job.status, job.plan) for job in ended] == [("succeeded", {"for": "a"}), ("succeeded", {"for": "b"})]


def test_jobs_that_waited_before_the_start_are_run(store: JobStore, runner: Callable[..., JobRunner]) -> None:
    job = store.add("f", {"model": "late"})
    runner(fakes_for_jobs.refuse)
    assert until_ended(store, job.id).error == {"title": "no", "status": 422, "detail": "late"}


def test_process_that_dies_fails_its_job_and_no_other(
    store: JobStore, runner: Callable[..., JobRunner], tmp_path: Path
) -> None:
    mark = str(tmp_path / "mark")
    jobs = [store.add(name, {"model": name, "mark": mark}) for name in "ab"]
    runner(fakes_for_jobs.die_once)
    first, second = (until_ended(store, job.id) for job in jobs)
    assert first.status == "failed"
    assert first.error is not None
    assert first.error["title"] == "The worker process died"
    assert first.may_be_tried_again
    assert second.status == "succeeded"


def test_running_job_can_be_cancelled(store: JobStore, runner: Callable[..., JobRunner], pipes: dict[str, str]) -> None:
    job = store.add("f", {"model": "a", **pipes})
    running = runner(fakes_for_jobs.block)
    assert Path(pipes["started"]).read_text() == "started"
    assert running.cancel(job.id)
    assert not running.cancel(job.id)
    assert until_ended(store, job.id).status == "cancelled"


def test_job_that_takes_too_long_is_ended(
    store: JobStore, runner: Callable[..., JobRunner], pipes: dict[str, str]
) -> None:
    job = store.add("f", {"model": "a", **pipes})
    runner(fakes_for_jobs.block, timeout_s=0.5)
    ended = until_ended(store, job.id)
    assert ended.status == "failed"
    assert ended.error is not None
    assert ended.error["title"] == "Planning took too long"


def test_stopping_puts_the_running_job_back(
    store: JobStore, runner: Callable[..., JobRunner], pipes: dict[str, str]
) -> None:
    job = store.add("f", {"model": "a", **pipes})
    running = runner(fakes_for_jobs.block)
    assert Path(pipes["started"]).read_text() == "started"
    running.stop()
    assert store.counts() == {"queued": 1}
    runner(fakes_for_jobs.answer)
    assert until_ended(store, job.id).status == "succeeded"


def test_job_that_was_running_when_the_server_died_is_queued_again(store: JobStore) -> None:
    job = store.add("f", {})
    store.claim()
    assert store.put_back_interrupted() == 1
    again = store.claim()
    assert again is not None
    assert again.id == job.id
