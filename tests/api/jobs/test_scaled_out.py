"""The service on a real PostgreSQL, with workers in processes of their own, as they would be on other machines."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import SecretStr
from support import fakes_for_jobs
from support.postgresql import PostgreSQL
from support.serving import Server, Worker, start_server, start_worker
from support.small_models import TINY_REQUEST

from api.jobs.remote_worker import RemoteWorker, work
from api.jobs.settings import ServerSettings
from api.requests.schemas import PlanRequest
from planner.errors import JobError
from planner.plan.sharding_plan import ShardingPlan

SOON = {"SHARDPLAN_LEASE_S": "2"}
"""A dead worker is noticed after two seconds, not fifteen."""


class Cluster:
    """A server and workers on one database."""

    def __init__(self, url: str, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self._environment = {"SHARDPLAN_DATABASE_URL": url, **SOON}
        self.server: Server = start_server(folder / "data", **self._environment)
        self.workers: list[Worker] = []

    def add_worker(self, **environment: str) -> Worker:
        log = self._folder / f"worker-{uuid.uuid4().hex}.log"
        worker = start_worker(log, **{**self._environment, **environment})
        self.workers.append(worker)
        return worker

    def submit(self, **change: Any) -> httpx2.Response:
        return httpx2.post(f"{self.server.url}/v1/plans", json={**TINY_REQUEST, **change}, timeout=30)

    def events(self, job: str) -> list[str]:
        """Return the data of a job's events, to its end."""
        answer = httpx2.get(f"{self.server.url}/v1/plans/{job}/events", timeout=300)
        return [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]

    def until_at_work(self, job: str) -> Worker:
        """Return the worker that has started a job."""
        pause = threading.Event()
        for _ in range(900):
            for worker in self.workers:
                if job in worker.jobs("job started"):
                    return worker
            pause.wait(0.05)
        raise AssertionError(f"nobody started job {job}")

    def stop(self) -> None:
        for process in (self.server, *self.workers):
            if process.process.poll() is None:
                process.stop()


@pytest.fixture
def cluster(postgresql: PostgreSQL, tmp_path: Path) -> Iterator[Cluster]:
    name = uuid.uuid4().hex
    running = Cluster(postgresql.create(name), name, tmp_path)
    yield running
    running.stop()


def without_timings(plan: dict[str, Any]) -> dict[str, Any]:
    data = ShardingPlan.from_dict(plan).to_dict()
    del data["timings"], data["solver"]["time_s"]
    return data


@pytest.fixture(scope="module")
def python_plan() -> ShardingPlan:
    from api.requests.plan_request import plan_request

    return plan_request(PlanRequest.model_validate(TINY_REQUEST), allow_local=False)


@pytest.mark.slow
def test_three_workers_give_the_plans_of_one_server_though_one_of_them_is_killed(
    cluster: Cluster, python_plan: ShardingPlan
) -> None:
    threads = [threading.Thread(target=cluster.add_worker) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    jobs = [cluster.submit(seq=seq).json()["id"] for seq in (32, 16, 64)]
    killed = cluster.until_at_work(jobs[0])
    killed.kill()
    ended = [cluster.server.until_ended(job) for job in jobs]
    assert [job["status"] for job in ended] == ["succeeded"] * 3
    assert without_timings(ended[0]["plan"]) == without_timings(python_plan.to_dict())
    assert cluster.submit().status_code == 200
    assert jobs[0] not in killed.jobs("job finished")
    finished = [job for worker in cluster.workers for job in worker.jobs("job finished")]
    assert sorted(finished) == sorted(jobs), "each was finished once"
    runs = [cluster.events(job).count('{"stage": "running"}') for job in jobs]
    assert runs[0] == 2, "the killed worker's job ran again, once"
    assert max(runs) == 2


@pytest.mark.slow
def test_stopped_worker_gives_its_job_back(cluster: Cluster) -> None:
    stopped = cluster.add_worker()
    job = cluster.submit().json()["id"]
    cluster.until_at_work(job)
    assert stopped.stop() == 0
    assert httpx2.get(f"{cluster.server.url}/v1/plans/{job}").json()["status"] == "queued"
    cluster.add_worker()
    assert cluster.server.until_ended(job)["status"] == "succeeded"


@pytest.mark.slow
def test_cut_connections_lose_nothing(cluster: Cluster, postgresql: PostgreSQL) -> None:
    worker = cluster.add_worker()
    first = cluster.submit().json()["id"]
    cluster.until_at_work(first)
    assert postgresql.cut_connections(cluster.name) > 2
    second = cluster.submit(seq=16)
    assert second.status_code in {202, 503}
    if second.status_code == 503:
        second = cluster.submit(seq=16)
    jobs = [first, second.json()["id"]]
    assert [cluster.server.until_ended(job)["status"] for job in jobs] == ["succeeded"] * 2
    assert sorted(set(worker.jobs("job started"))) == sorted(jobs)
    assert worker.process.poll() is None


@pytest.mark.slow
def test_cancelled_job_stops_on_its_worker(cluster: Cluster) -> None:
    worker = cluster.add_worker()
    job = cluster.submit().json()["id"]
    cluster.until_at_work(job)
    assert httpx2.delete(f"{cluster.server.url}/v1/plans/{job}").json()["status"] == "cancelled"
    pause = threading.Event()
    for _ in range(40):  # two seconds
        if worker.jobs("job left") == [job]:
            break
        pause.wait(0.05)
    assert worker.jobs("job left") == [job]


def test_worker_plans_as_many_jobs_at_once_as_it_is_told(postgresql: PostgreSQL, tmp_path: Path) -> None:
    many = 40  # asyncio's own threads are at most 32
    settings = ServerSettings(database_url=SecretStr(postgresql.url()), data_dir=tmp_path, workers=many)
    worker = RemoteWorker(settings, fakes_for_jobs.answer)
    together = threading.Barrier(many)
    worker._plan_waiting = lambda: together.wait(10.0)  # type: ignore[assignment, method-assign, return-value]

    async def plan_all() -> None:
        await asyncio.gather(*(worker._plan() for _ in range(many)))

    asyncio.run(plan_all())
    assert not together.broken


def test_worker_without_workers_is_refused() -> None:
    with pytest.raises(JobError, match="plan nothing"):
        work({"database_url": "postgresql://nowhere/shardplan", "workers": 0})


def test_worker_needs_a_database_that_is_shared(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="needs a PostgreSQL database"):
        start_worker(tmp_path / "log")
