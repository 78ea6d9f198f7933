"""The jobs in their database, SQLite and PostgreSQL alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from sqlalchemy import delete, event, update

from api.http.idempotency import IdempotencyError, IdempotencyKeys
from api.jobs.database import Database
from api.jobs.events import read_news
from api.jobs.housekeeping import forget
from api.jobs.store import JobRecord, JobStore, Limits, TooManyJobsError
from api.jobs.tables import EventRow, JobRow, PlanRow
from api.jobs.tokens import TokenStore
from planner.errors import JobError

DAY_S = 86_400.0


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database)


def claimed(store: JobStore) -> JobRecord:
    job = store.claim()
    assert job is not None
    return job


def read_again(store: JobStore, job: JobRecord) -> JobRecord:
    found = store.get(job.id)
    assert found is not None
    return found


def age(database: Database, job: JobRecord, seconds: float) -> None:
    """Let a job have ended, and its lease have run out, so much earlier."""
    earlier = {"finished_at": JobRow.finished_at - seconds, "lease_until": JobRow.lease_until - seconds}
    with database.write() as connection:
        connection.execute(update(JobRow).where(JobRow.number == job.number).values(**earlier))


def test_same_request_of_one_owner_is_one_job(store: JobStore) -> None:
    first, second = store.add("f", {"model": "a"}), store.add("f", {"model": "a"})
    assert first.id == second.id
    assert store.counts() == {"queued": 1}
    assert store.find("f") == first
    assert store.find("f", owner="other") is None


def test_longest_waiting_is_claimed_first_and_once(store: JobStore) -> None:
    ids = [store.add(name, {"model": name}).id for name in "abc"]
    found = [store.claim() for _ in range(4)]
    assert [job.id for job in found if job is not None] == ids
    assert found[3] is None


def test_no_two_of_many_claimants_get_the_same_job(store: JobStore) -> None:
    ids = {store.add(str(number), {}).id for number in range(12)}
    found: list[str] = []

    def claim_all() -> None:
        while (job := store.claim()) is not None:
            found.append(job.id)

    threads = [threading.Thread(target=claim_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while (job := store.claim()) is not None:  # a claimant may give up where it lost three races
        found.append(job.id)
    assert sorted(found) == sorted(ids)


def test_equal_requests_of_two_owners_are_planned_once(store: JobStore) -> None:
    mine, theirs = store.add("f", {}, owner="a"), store.add("f", {}, owner="b")
    job = claimed(store)
    assert store.claim() is None
    assert store.succeed(job, {"mesh": 1})
    assert [read_again(store, one).plan for one in (mine, theirs)] == [{"mesh": 1}] * 2
    assert store.add("f", {}, owner="c").status == "succeeded"


def test_equal_request_waits_on_where_the_server_failed(store: JobStore) -> None:
    store.add("f", {}, owner="a")
    theirs = store.add("f", {}, owner="b")
    store.fail(claimed(store), {"status": 500})
    assert claimed(store).id == theirs.id


def test_cancelled_job_stays_cancelled_whatever_its_worker_brings(store: JobStore) -> None:
    store.add("f", {})
    job = claimed(store)
    assert store.is_claimed(job)
    assert store.cancel(job.id)
    assert not store.is_claimed(job)
    assert not store.renew(job, 60.0)
    assert not store.succeed(job, {})
    assert not store.cancel(job.id)
    after = read_again(store, job)
    assert (after.status, after.plan) == ("cancelled", None)


@pytest.mark.parametrize(
    ("status", "again"), [(422, "failed"), (500, "queued")], ids=["the request's fault", "the server's fault"]
)
def test_failed_job_is_tried_again_only_where_the_server_was_at_fault(store: JobStore, status: int, again: str) -> None:
    store.add("f", {})
    store.fail(claimed(store), {"status": status})
    assert store.add("f", {}).status == again


def meanwhile(database: Database, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what both return; ``second`` runs into what ``first`` is about to commit."""
    about_to_commit, go_on = threading.Event(), threading.Event()

    def stay(connection: object) -> None:
        if threading.current_thread().name.startswith("first"):
            about_to_commit.set()
            go_on.wait(30.0)

    event.listen(database.engine, "commit", stay)
    with ThreadPoolExecutor(1, "first") as one, ThreadPoolExecutor(1, "second") as other:
        early = one.submit(first)
        assert about_to_commit.wait(30.0)
        late = other.submit(second)
        wait([late], timeout=0.5)
        go_on.set()
        found = early.result(30.0), late.result(30.0)
    event.remove(database.engine, "commit", stay)
    return found


def test_job_cancelled_as_it_ends_takes_no_equal_one_with_it(database: Database, store: JobStore) -> None:
    store.add("f", {}, owner="a")
    theirs = store.add("f", {}, owner="b")
    job = claimed(store)
    assert meanwhile(database, lambda: store.cancel(job.id), lambda: store.succeed(job, {"mesh": 1})) == (True, False)
    assert read_again(store, theirs).status == "queued"


def test_job_that_is_asked_for_again_as_it_is_forgotten_stays(database: Database, store: JobStore) -> None:
    job = store.add("f", {})
    store.fail(claimed(store), {"status": 500})
    age(database, job, 40 * DAY_S)
    _, forgotten = meanwhile(
        database, lambda: store.add("f", {}), lambda: forget(database, keep_s=30 * DAY_S, most_kept=10)
    )
    assert forgotten == 0
    assert read_again(store, job).status == "queued"


def test_plan_that_is_asked_for_as_it_is_forgotten_stays(database: Database, store: JobStore) -> None:
    store.add("f", {}, owner="a")
    store.succeed(claimed(store), {"mesh": 1})
    with database.write() as connection:
        connection.execute(delete(EventRow))
        connection.execute(delete(JobRow))
        connection.execute(update(PlanRow).values(made_at=PlanRow.made_at - 40 * DAY_S))
    job, _ = meanwhile(
        database, lambda: store.add("f", {}, owner="b"), lambda: forget(database, keep_s=30 * DAY_S, most_kept=10)
    )
    assert read_again(store, job).plan == {"mesh": 1}


def test_lease_that_is_renewed_at_the_last_moment_holds(database: Database, store: JobStore) -> None:
    job = store.add("f", {})
    running = claimed(store)
    age(database, job, 3600.0)
    assert meanwhile(database, lambda: store.renew(running, 60.0), store.lose_expired) == (True, 0)
    assert store.is_claimed(running)


def test_equal_requests_at_one_moment_are_one_job_that_is_queued_once(database: Database, store: JobStore) -> None:
    first, second = meanwhile(database, lambda: store.add("f", {}), lambda: store.add("f", {}))
    assert first.id == second.id
    news = read_news(database, {first.number: 0})[first.number]
    assert [item.data_json for item in news.events] == ['{"stage": "queued"}']


def test_job_of_a_lost_worker_runs_again_once(database: Database, store: JobStore) -> None:
    job = store.add("f", {})
    first = claimed(store)
    assert store.lose_expired() == 0
    age(database, job, 3600.0)
    assert store.lose_expired() == 1
    second = claimed(store)
    assert (second.id, second.attempt) == (job.id, 2)
    assert not store.succeed(first, {"from": "the dead"})
    assert store.lose(second)
    after = read_again(store, job)
    assert after.status == "failed"
    assert (after.error or {})["title"] == "The worker process died"
    assert after.may_be_tried_again


def test_job_given_back_keeps_its_place_and_may_run_often(store: JobStore) -> None:
    first = store.add("a", {})
    store.add("b", {})
    for attempt in (1, 2, 3):
        job = claimed(store)
        assert (job.id, job.attempt) == (first.id, attempt)
        assert store.release(job)


def test_events_tell_what_happened(database: Database, store: JobStore) -> None:
    job = store.add("f", {})
    running = claimed(store)
    store.renew(running, 60.0, [{"stage": "tracing"}, {"stage": "solving", "mesh": "dp=2"}])
    found = read_news(database, {job.number: 0})[job.number]
    assert not found.ended
    store.succeed(running, {})
    rest = read_news(database, {job.number: found.events[-1].number})[job.number]
    assert rest.ended
    assert [event.data_json for event in (*found.events, *rest.events)] == [
        '{"stage": "queued"}',
        '{"stage": "running"}',
        '{"stage": "tracing"}',
        '{"stage": "solving", "mesh": "dp=2"}',
        '{"stage": "succeeded"}',
    ]


def test_limits_on_waiting_jobs(database: Database) -> None:
    store = JobStore(database, limits=Limits(queued=3, unfinished_per_owner=2))
    known = store.add("a", {}, owner="x")
    store.add("b", {}, owner="x")
    with pytest.raises(TooManyJobsError, match="2 jobs of yours"):
        store.add("c", {}, owner="x")
    assert store.add("a", {}, owner="x").id == known.id
    store.add("c", {}, owner="y")
    with pytest.raises(TooManyJobsError, match="Too many jobs are waiting"):
        store.add("d", {}, owner="z")


def test_jobs_of_each_kind_are_listed_apart(store: JobStore) -> None:
    plan = store.add("a", {"model": "a"})
    front = store.add("b", {"kind": "pareto", "request": {}})
    assert [job.kind for job in store.page(owner="")] == ["pareto", "plan"]
    assert [job.id for job in store.page(owner="", kinds=("plan",))] == [plan.id]
    assert [job.id for job in store.page(owner="", kinds=("alternatives", "pareto"))] == [front.id]
    for _ in range(2):
        store.succeed(claimed(store), [{"mesh": "dp=4"}])
    after = read_again(store, front)
    assert (after.result_json, after.plan) == ('[{"mesh": "dp=4"}]', None), "its result is no plan"


def test_pages_go_from_the_newest_to_the_oldest(store: JobStore) -> None:
    ids = [store.add(name, {}, owner="x").id for name in "abcde"]
    store.add("f", {}, owner="y")
    store.cancel(ids[1])
    first = store.page(owner="x", limit=2)
    second = store.page(owner="x", limit=9, before=first[-1].number)
    assert [job.id for job in (*first, *second)] == ids[::-1]
    assert [job.id for job in store.page(owner="x", status="cancelled")] == [ids[1]]
    assert len(store.page(owner=None)) == 6


def test_what_is_old_or_beyond_the_quota_is_forgotten(database: Database, store: JobStore) -> None:
    old, *kept = [store.add(name, {}) for name in "abc"]
    for _ in range(3):
        store.succeed(claimed(store), {})
    waiting = store.add("d", {})
    age(database, old, 40 * DAY_S)
    assert forget(database, keep_s=30 * DAY_S, most_kept=10) == 1
    assert [store.get(job.id) is None for job in (old, *kept, waiting)] == [True, False, False, False]
    assert forget(database, keep_s=30 * DAY_S, most_kept=1) == 1
    assert store.get(kept[0].id) is None
    assert store.add("b", {}).status == "succeeded", "the plan is younger than the quota lets its job be"


def test_idempotency_key_is_for_one_request(database: Database) -> None:
    keys = IdempotencyKeys(database)
    with keys.used("x", "k", "digest") as used:
        assert used.job_id is None
        used.job_id = "job"
    with keys.used("x", "k", "digest") as used:
        assert used.job_id == "job"
        used.job_id = "another"  # the first was forgotten
    with keys.used("x", "k", "digest") as used:
        assert used.job_id == "another"
    with keys.used("y", "k", "other") as used:
        assert used.job_id is None
    with pytest.raises(IdempotencyError, match="another request"), keys.used("x", "k", "other"):
        pass
    with pytest.raises(IdempotencyError, match="visible ASCII"), keys.used("x", "k" * 256, "digest"):
        pass


def test_idempotency_key_is_taken_before_there_is_a_job(database: Database) -> None:
    keys = IdempotencyKeys(database)
    with keys.used("x", "k", "digest") as used:
        with pytest.raises(IdempotencyError, match="another request"), keys.used("x", "k", "other"):
            pass
        with keys.used("x", "k", "digest") as same:
            same.job_id = "job"
        used.job_id = "job"
    with keys.used("x", "k", "digest") as used:
        assert used.job_id == "job"


def test_refused_request_uses_up_no_idempotency_key(database: Database) -> None:
    keys = IdempotencyKeys(database)
    with pytest.raises(RuntimeError, match="full"), keys.used("x", "k", "digest"):
        raise RuntimeError("full")
    with keys.used("x", "k", "corrected") as used:
        assert used.job_id is None
        used.job_id = "job"
    with pytest.raises(RuntimeError, match="gone"), keys.used("x", "k", "corrected"):
        raise RuntimeError("gone")
    with keys.used("x", "k", "corrected") as used:
        assert used.job_id == "job"


def test_tokens_are_kept_as_hashes_and_can_be_revoked(database: Database) -> None:
    tokens = TokenStore(database)
    assert not tokens.any()
    text = tokens.create("ci", "plan")
    token = tokens.all()[0]
    assert tokens.find(text) == (token.id, "plan")
    for other in ("", "sp_", text[:-1], text + "x", text.replace(token.id, "0" * 16), text[:-1] + "!"):
        assert tokens.find(other) is None
    with database.read() as connection:
        stored = str(connection.exec_driver_sql("SELECT * FROM tokens").all())
    assert text.split("_", 2)[2] not in stored
    assert tokens.revoke(token.id).revoked_at is not None
    assert tokens.find(text) is None
    assert tokens.any()
    with pytest.raises(JobError, match="there is no token"):
        tokens.revoke("none")
    with pytest.raises(JobError, match="there is no scope"):
        tokens.create("ci", "root")
