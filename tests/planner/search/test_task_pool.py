"""Tasks in other processes: the same plans, whatever dies or is interrupted."""

from __future__ import annotations

import functools
import gc
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import joblib
import psutil
import pytest
from loky import process_executor
from support import families

from planner.errors import JobError, SolverError
from planner.plan.sharding_plan import ShardingPlan
from planner.run.stage_clock import Clock
from planner.search.mesh_search import MeshSearch
from planner.search.task_pool import Pool, checked_jobs, start_workers
from planner.session import PlanningSession


@dataclass
class Adder:
    """A context that counts its tasks."""

    clock: Clock = field(default_factory=Clock)
    done: int = 0
    remembered: bytes = b""
    name: str = field(
        default_factory=lambda: uuid.uuid4().hex
    )  # a worker keeps the last context, one of the same bytes


def add(number: int, context: Adder, to: int) -> tuple[int, int, int]:
    """Return the sum, the process, and how many tasks its context has done."""
    with context.clock.stage("adding"):
        context.done += 1
    return number + to, os.getpid(), context.done


def meet_and_add(path: Path, end: str, number: int, context: Adder, to: int) -> tuple[int, int, int]:
    """Add while another process does: opening one end of a pipe waits until the other one is opened."""
    path.open(end).close()
    return add(number, context, to)


def shared_adds(folder: Path, count: int) -> list[Any]:
    """Return tasks that add 0, 1, ...; the first that are picked are run by two processes at once."""
    path = pipe(folder)
    together = [functools.partial(meet_and_add, path, end, number) for number, end in enumerate("rw")]
    return [*(functools.partial(add, number) for number in range(2, count)), *together]  # the last is picked first


def pipe(folder: Path) -> Path:
    path = folder / uuid.uuid4().hex
    os.mkfifo(path)
    return path


def remember(context: Adder, _: int) -> tuple[int, int]:
    """Keep more than loky takes for no leak; return the process and its tasks done."""
    process_executor._MEMORY_LEAK_CHECK_DELAY = 0.0  # after each task, not once a second
    if context.done:  # what is there after the first task it takes for granted
        context.remembered = b"x" * 400_000_000
    context.done += 1
    return os.getpid(), context.done


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_long() -> None:
    threading.Event().wait(60)


def fail() -> None:
    raise LookupError("of the task")


def interrupt() -> None:
    """As control-C does."""
    raise KeyboardInterrupt


def nothing() -> None:
    pass


def in_turn(
    path: Path, end: str, here: int, parts: tuple[Callable[[], None], Callable[[], None]], context: Adder, _: int
) -> None:
    """Do one thing in the process of the tests and, at the same time, another thing elsewhere."""
    path.open(end).close()
    parts[os.getpid() != here]()


def both(folder: Path, here: Callable[[], None], elsewhere: Callable[[], None]) -> list[Any]:
    """Return a task for each of two processes, which are picked first, and one more."""
    path = pipe(folder)
    together = [functools.partial(in_turn, path, end, os.getpid(), (here, elsewhere)) for end in "rw"]
    return [functools.partial(add, 0), *together]


def call(part: Callable[[], None], context: Adder, _: int) -> None:
    part()


def workers() -> list[psutil.Process]:
    """Return the processes that work beside this one."""
    children = psutil.Process().children(recursive=True)
    return [c for c in children if c.is_running() and "LokyProcess" in " ".join(c.cmdline())]


class Tasks:
    """Hands out tasks, and starts another round once those are done."""

    def __init__(self, tasks: list[Any], later: list[Any] | None = None) -> None:
        self.tasks, self.later = list(tasks), list(later or [])
        self.found: list[tuple[int, Any]] = []

    def pick(self) -> tuple[int, Any] | None:
        return (len(self.tasks), self.tasks.pop()) if self.tasks else None

    def done(self, tag: int, task: Any, found: Any) -> None:
        self.found.append((tag, found))
        if self.later:
            self.tasks.append(self.later.pop())


def two_at_once() -> Pool:
    """Return a pool of this process and another one, which is ready."""
    others = start_workers(2)
    assert others is not None
    assert others.ready(0) != os.getpid()
    return Pool(Adder(), jobs=2)


def test_a_context_is_sent_once_and_results_can_lead_to_more_tasks(tmp_path: Path) -> None:
    tasks = shared_adds(tmp_path, 12)
    search, context = Tasks(tasks[-2:], tasks[:-2]), Adder()
    two_at_once()
    pool = Pool(context, jobs=2)
    pool.run(search.pick, search.done, 100)
    assert sorted(total for _, (total, _, _) in search.found) == list(range(100, 112))
    processes = {process for _, (_, process, _) in search.found}
    assert len(processes) == 2
    assert os.getpid() in processes
    assert sum(max(n for _, (_, p, n) in search.found if p == process) for process in processes) == 12
    assert context.done == 0  # the context itself is only read, by what picks the next task
    assert context.clock.spent["adding"] > 0
    again = Tasks([functools.partial(add, 0)])
    pool.run(again.pick, again.done, 200)
    assert [total for _, (total, _, _) in again.found] == [200]


def test_what_is_sent_is_a_file_for_as_long_as_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    search, pool = Tasks([functools.partial(add, 1)]), Pool(Adder(), jobs=2)
    pool.run(search.pick, search.done, 0)
    assert len(list(tmp_path.iterdir())) == 1
    del pool
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_processes_that_remember_much_are_kept() -> None:
    search = Tasks([remember] * 6)
    two_at_once().run(search.pick, search.done, 0)
    done = [found for _, found in search.found]
    assert len({p for p, _ in done}) == 2
    assert sum(max(n for p, n in done if p == process) for process in {p for p, _ in done}) == 6


def test_those_that_began_early_are_those_that_work(tmp_path: Path) -> None:
    others = start_workers(3)
    assert others is not None
    assert others.ready(1)
    there = {process.pid for process in workers()}
    search = Tasks(shared_adds(tmp_path, 30))
    Pool(Adder(), jobs=3).run(search.pick, search.done, 0)
    others.stop()
    # Others that were begun anew would be different ones.
    worked = {process for _, (_, process, _) in search.found}
    assert len(worked) > 1
    assert worked <= there | {os.getpid()}
    assert start_workers(1) is None


def test_the_caller_says_where_searchrun() -> None:
    search = Tasks([functools.partial(add, number) for number in range(4)])
    with joblib.parallel_config(backend="threading"):
        assert start_workers(2) is None
        Pool(Adder(), jobs=2).run(search.pick, search.done, 0)
    assert {process for _, (_, process, _) in search.found} == {os.getpid()}
    assert max(n for _, (_, _, n) in search.found) == 4


def test_a_worker_that_dies_is_an_error_that_says_so(tmp_path: Path) -> None:
    search, pool = Tasks(both(tmp_path, nothing, die)), two_at_once()
    with pytest.raises(SolverError, match="worker process") as raised:
        pool.run(search.pick, search.done, 0)
    assert "fewer jobs" in raised.value.what_to_do
    assert not gone(workers())
    again = Tasks([functools.partial(add, number) for number in range(4)])
    pool.run(again.pick, again.done, 0)
    assert len(again.found) == 4


def gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return which are still there, after a moment."""
    return psutil.wait_procs(processes, timeout=10)[1]


def test_nothing_is_left_running_when_it_is_interrupted(tmp_path: Path) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for here, done in ((interrupt, Tasks([]).done), (nothing, interrupted)):
        search, pool = Tasks(both(tmp_path, here, wait_long)), two_at_once()
        with pytest.raises(KeyboardInterrupt):
            pool.run(search.pick, done, 0)
        assert not gone(workers())


@pytest.mark.parametrize(("here", "elsewhere"), [(fail, nothing), (nothing, fail)])
def test_what_a_task_raises_is_raised(here: Callable[[], None], elsewhere: Callable[[], None], tmp_path: Path) -> None:
    search = Tasks(both(tmp_path, here, elsewhere))
    with pytest.raises(LookupError, match="of the task"):
        two_at_once().run(search.pick, search.done, 0)


def test_what_a_task_raises_in_a_thread_is_raised() -> None:
    search = Tasks([functools.partial(call, fail)] * 3)
    with joblib.parallel_config(backend="threading"), pytest.raises(LookupError, match="of the task"):
        Pool(Adder(), jobs=2).run(search.pick, search.done, 0)


@pytest.mark.parametrize("backend", ["loky", "threading"])
def test_what_the_search_raises_is_raised(backend: str) -> None:
    def broken() -> None:
        raise LookupError("of the search")

    with joblib.parallel_config(backend=backend), pytest.raises(LookupError, match="of the search"):
        Pool(Adder(), jobs=2).run(broken, Tasks([]).done, 0)


def test_no_jobs_are_refused() -> None:
    with pytest.raises(JobError, match="jobs"):
        checked_jobs(0)


def session(jobs: int, **options: Any) -> PlanningSession:
    module, inputs = families.make("gpt2", 8)
    options = {"memory_gb": 0.003, "micro_batches": None} | options
    return PlanningSession(module, example_inputs=inputs, cluster="1x4xtoy", dtype="fp32", jobs=jobs, **options)


def times(plan: ShardingPlan) -> tuple[float, float]:
    assert plan.estimate is not None
    assert plan.solver is not None
    assert plan.solver.bound_s is not None
    return plan.estimate.step_time_s, plan.solver.bound_s


def test_plans_cost_the_same_with_two_jobs() -> None:
    alone, both = session(1), session(2)
    for cap in (None, int(0.6 * times_peak(alone))):
        one, two = alone.plan(memory_bytes=cap), both.plan(memory_bytes=cap)
        (one_s, one_bound_s), (two_s, two_bound_s) = times(one), times(two)
        gap = alone.job.mip_gap
        assert one_s == pytest.approx(two_s, rel=2 * gap)
        assert max(one_bound_s, two_bound_s) <= min(one_s, two_s)
        assert two.solver is not None
        assert two.solver.status == "optimal"
        assert two.timings.keys() >= {"costs_s", "solve_s"}


def times_peak(planned: PlanningSession) -> int:
    plan = planned.plan()
    assert plan.estimate is not None
    return plan.estimate.peak_memory_bytes


def test_two_jobs_keep_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is up once there is a plan: what was begun ends, nothing else begins, and the gap says what is left."""
    monkeypatch.setattr(MeshSearch, "is_over", property(lambda self: self._best is not None))
    plan = session(2).plan()
    step_s, bound_s = times(plan)
    assert plan.solver is not None
    assert plan.solver.status == "time-limit"
    assert bound_s < step_s
