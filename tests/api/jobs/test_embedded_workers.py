"""The embedded workers: what happens to a job when things go right, wrong, and away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine, event, select
from support import fakes_for_jobs

from api.jobs import supervisor
from api.jobs.database import Database
from api.jobs.embedded_workers import JobRunner
from api.jobs.events import read_news
from api.jobs.metrics import Metrics
from api.jobs.solver_main import Solve
from api.jobs.solver_process import SolverProcess
from api.jobs.store import JobRecord, JobStore
from api.jobs.supervisor import SolveLimits, Supervisor

PAGES = "PRAGMA max_page_count"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
    opened.migrate()
    yield opened
    opened.close()


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database)


@pytest.fixture
def runner(store: JobStore) -> Iterator[Callable[..., JobRunner]]:
    started: list[JobRunner] = []

    def start(job: Solve, *, time_s: float = 60.0, memory_bytes: int = 4_000_000_000) -> JobRunner:
        limits = SolveLimits(time_s=time_s, grace_s=0.0, memory_bytes=memory_bytes)
        started.append(JobRunner(store, workers=1, limits=limits, metrics=Metrics(), job=job))
        started[-1].start()
        return started[-1]

    yield start
    for running in started:
        running.stop()


def until_ended(store: JobStore, job_id: str) -> JobRecord:
    pause = threading.Event()
    for _ in range(1200):
        job = store.get(job_id)
        assert job is not None
        if job.ended:
            return job
        pause.wait(0.05)
    raise AssertionError(f"{job} has not ended")


def error_of(job: JobRecord) -> dict[str, object]:
    assert job.status == "failed"
    assert job.error is not None
    return job.error


def solvers() -> list[psutil.Process]:
    """Return the solver processes of this one."""
    grandchildren = [child for fork_server in psutil.Process().children() for child in fork_server.children()]
    return [child for child in grandchildren if "forkserver" in " ".join(child.cmdline())]


@pytest.fixture
def pipes(tmp_path: Path) -> dict[str, str]:
    names = {name: str(tmp_path / name) for name in ("started", "released")}
    for path in names.values():
        os.mkfifo(path)
    return names


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


def test_job_whose_process_dies_runs_again_once(
    store: JobStore, runner: Callable[..., JobRunner], tmp_path: Path
) -> None:
    job = store.add("a", {"model": "a", "mark": str(tmp_path / "mark")})
    runner(fakes_for_jobs.die_once)
    ended = until_ended(store, job.id)
    assert (ended.status, ended.attempt) == ("succeeded", 2)


def test_job_that_kills_every_process_fails_and_takes_no_other_with_it(
    store: JobStore, runner: Callable[..., JobRunner]
) -> None:
    job = store.add("a", {})
    runner(fakes_for_jobs.die)
    ended = until_ended(store, job.id)
    assert error_of(ended)["title"] == "The worker process died"
    assert ended.attempt == 2
    assert ended.may_be_tried_again


def test_long_jobs_of_one_owner_do_not_make_another_wait(
    store: JobStore, runner: Callable[..., JobRunner], pipes: dict[str, str]
) -> None:
    long = store.add("long", {"model": "a", **pipes}, owner="first")
    running = runner(fakes_for_jobs.block_where_asked)
    assert Path(pipes["started"]).read_text() == "started"
    own = store.add("own", {"model": "a"}, owner="first")
    other = store.add("other", {"model": "b"}, owner="second")
    running.wake()
    assert until_ended(store, other.id).status == "succeeded"
    found = [store.get(job.id) for job in (long, own)]
    assert [job.status for job in found if job] == ["running", "queued"]
    Path(pipes["released"]).write_text("go")
    assert until_ended(store, own.id).status == "succeeded"


def test_running_job_that_is_cancelled_stops_within_two_seconds(
    store: JobStore, runner: Callable[..., JobRunner], pipes: dict[str, str]
) -> None:
    job = store.add("f", {"model": "a", **pipes})
    runner(fakes_for_jobs.block)
    assert Path(pipes["started"]).read_text() == "started"
    (process,) = solvers()
    assert store.cancel(job.id)
    psutil.wait_procs([process], timeout=2.0)
    assert not process.is_running()
    assert until_ended(store, job.id).status == "cancelled"


def test_progress_is_recorded_while_the_job_runs(
    database: Database, store: JobStore, runner: Callable[..., JobRunner], pipes: dict[str, str]
) -> None:
    job = store.add("f", {"model": "a", **pipes})
    runner(fakes_for_jobs.block)
    assert Path(pipes["started"]).read_text() == "started"
    Path(pipes["released"]).write_text("")
    until_ended(store, job.id)
    news = read_news(database, {job.number: 0})[job.number]
    assert [item.data_json for item in news.events][1:] == [
        '{"stage": "running"}',
        '{"stage": "blocking"}',
        '{"stage": "succeeded"}',
    ]


def test_job_that_takes_too_long_is_ended(
    store: JobStore, runner: Callable[..., JobRunner], pipes: dict[str, str]
) -> None:
    job = store.add("f", {"model": "a", **pipes})
    runner(fakes_for_jobs.block, time_s=0.5)
    assert error_of(until_ended(store, job.id))["title"] == "Planning took too long"


def test_search_is_told_how_long_it_may_take(store: JobStore, runner: Callable[..., JobRunner]) -> None:
    job = store.add("f", {"model": "a"})
    runner(fakes_for_jobs.answer_in_time, time_s=12.5)
    assert until_ended(store, job.id).plan == {"time_limit_s": 12.5}


def test_time_for_the_search_begins_with_the_search(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes long to build leaves its search the time that it was promised."""
    stages = [(5.0, "tracing"), (3.0, "bounding"), (4.0, "best"), (4.0, "solving")]
    assert followed(stages, store, monkeypatch).status == "succeeded"
    stages = [(5.0, "tracing"), (3.0, "bounding"), (4.0, "solving"), (7.0, "solving")]
    assert error_of(followed(stages, store, monkeypatch))["title"] == "Planning took too long"
    stages = [(11.0, "tracing")]
    assert error_of(followed(stages, store, monkeypatch))["title"] == "Planning took too long"


def followed(stages: list[tuple[float, str]], store: JobStore, monkeypatch: pytest.MonkeyPatch) -> JobRecord:
    """Return a job whose process took so many seconds to each of these stages, of 9 for its search and 1 of grace."""
    process = _Scripted(stages)
    monkeypatch.setattr(supervisor, "time", types.SimpleNamespace(monotonic=lambda: process.now_s))
    limits = SolveLimits(time_s=9.0, grace_s=1.0, memory_bytes=4_000_000_000)
    job = store.add(str(stages), {})
    claimed = store.claim()
    assert claimed is not None
    Supervisor(store, process, limits, threading.Event(), Metrics()).run(claimed)
    return until_ended(store, job.id)


class _Scripted(SolverProcess):
    """Stands in for a process; its clock is its own."""

    def __init__(self, stages: list[tuple[float, str]]) -> None:
        self.now_s = 0.0
        self._stages = iter(stages)

    def start(self) -> None:
        pass

    def ask(self, request_json: str, time_limit_s: float) -> None:
        pass

    def next_message(self, timeout_s: float) -> dict[str, Any]:
        took_s, stage = next(self._stages, (0.0, None))
        self.now_s += took_s
        return {"outcome": {"plan": {}}} if stage is None else {"event": {"stage": stage}}

    @property
    def resident_bytes(self) -> int:
        return 0

    def end(self) -> None:
        pass


def test_job_waits_for_a_machine_that_has_no_process_to_give(
    store: JobStore, runner: Callable[..., JobRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = iter([OSError("Resource temporarily unavailable")] * 4)
    start = SolverProcess.start

    def start_at_last(self: SolverProcess) -> None:
        if (refusal := next(refusals, None)) is not None:
            raise refusal
        start(self)

    monkeypatch.setattr(SolverProcess, "start", start_at_last)
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_S", 0.01)
    job = store.add("f", {"model": "a"})
    runner(fakes_for_jobs.answer)
    ended = until_ended(store, job.id)
    assert (ended.status, ended.attempt) == ("succeeded", 4)


def test_job_that_takes_too_much_memory_is_ended_and_says_so(store: JobStore, runner: Callable[..., JobRunner]) -> None:
    job = store.add("f", {"model": "a"})
    runner(fakes_for_jobs.swallow_memory, memory_bytes=1_000_000_000)
    error = error_of(until_ended(store, job.id))
    assert error["title"] == "Planning took too much memory"
    assert "at most 1.00 GB" in str(error["detail"])


def test_stopping_puts_the_running_job_back(
    store: JobStore, runner: Callable[..., JobRunner], pipes: dict[str, str]
) -> None:
    job = store.add("f", {"model": "a", **pipes})
    running = runner(fakes_for_jobs.block)
    assert Path(pipes["started"]).read_text() == "started"
    (process,) = solvers()
    process.terminate()  # as systemd does to the whole group: that is the server's to answer, and no death
    _, alive = psutil.wait_procs([process], timeout=0.5)
    assert alive
    running.stop()
    assert store.counts() == {"queued": 1}
    runner(fakes_for_jobs.answer)
    assert until_ended(store, job.id).status == "succeeded"


def test_job_that_was_running_when_the_server_died_runs_again(
    store: JobStore, runner: Callable[..., JobRunner]
) -> None:
    job = store.add("f", {"model": "a"})
    store.claim()
    runner(fakes_for_jobs.answer)
    assert until_ended(store, job.id).plan == {"for": "a"}


def test_result_waits_for_room_on_a_full_disk(
    database: Database, store: JobStore, runner: Callable[..., JobRunner], pipes: dict[str, str]
) -> None:
    job = store.add("f", {"model": "m", "times": 2_000_000, **pipes})
    runner(fakes_for_jobs.block)
    assert Path(pipes["started"]).read_text() == "started"
    full = _Full(database.engine)
    Path(pipes["released"]).write_text("")
    assert full.met.wait(30.0), "the result was not written to the full disk"
    assert store.get(job.id) is not None
    full.clear()
    assert until_ended(store, job.id).plan == {"for": "m" * 2_000_000}


class _Full:
    """Lets SQLite find no room on the disk until it is cleared: its own limit on the file gives the same error."""

    def __init__(self, engine: Engine) -> None:
        self.met = threading.Event()
        self._pages = 1
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(f"{PAGES} = {self._pages}"))
        event.listen(engine, "handle_error", lambda context: self._note(str(context.original_exception)))

    def clear(self) -> None:
        self._pages = 1_000_000

    def _note(self, error: str) -> None:
        if "disk is full" in error:
            self.met.set()


def test_process_that_another_thread_saw_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """`join` then returns at once, and for a moment nobody here knows that it is over."""
    process = SolverProcess(fakes_for_jobs.answer, 4_000_000_000)
    process.start()
    started = process._process
    assert started is not None
    is_alive, said = type(started).is_alive, []

    def late(self: Any) -> bool:
        said.append(is_alive(self))
        return len(said) < 5 or said[-1]

    def close(self: Any) -> None:
        assert len(said) >= 5, "it raises ValueError while it is not known to be over"

    monkeypatch.setattr(type(started), "join", lambda self: None)
    monkeypatch.setattr(type(started), "is_alive", late)
    monkeypatch.setattr(type(started), "close", close)
    process.end()
    assert len(said) >= 5
    assert not said[-1]


def test_solver_processes_end_with_their_parent(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from support import fakes_for_jobs\n"
        "from api.jobs.solver_process import SolverProcess\n"
        "if __name__ == '__main__':\n"
        "    process = SolverProcess(fakes_for_jobs.answer, 4_000_000_000)\n"
        '    process.start(); process.ask(\'{"model": "a"}\', 60.0)\n'
        "    assert process.next_message(60.0)\n"
        "    print(process._process.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    file = tmp_path / "parent.py"
    file.write_text(script)
    parent = subprocess.Popen(
        [sys.executable, file],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    solver = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    psutil.wait_procs([solver], timeout=10.0)
    assert not solver.is_running() or solver.status() == psutil.STATUS_ZOMBIE


def test_time_is_read_from_the_database(database: Database) -> None:
    with database.read() as connection:
        found = connection.scalar(select(database.now()))
    assert found == pytest.approx(time.time(), abs=5.0)
