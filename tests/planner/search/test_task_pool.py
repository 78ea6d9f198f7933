"""Tasks in other processes: the same plans, whatever dies or is interrupted."""

from __future__ import annotations

import functools
import gc
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import joblib
import psutil
import pytest
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
        time.sleep(0.05)
    return number + to, os.getpid(), context.done


def remember(context: Adder, _: int) -> tuple[int, int]:
    """Keep more than loky takes for no leak (it looks once a second); return the process and its tasks done."""
    if context.done:  # what is there after the first task it takes for granted
        context.remembered = b"x" * 400_000_000
    context.done += 1
    time.sleep(1.1)
    return os.getpid(), context.done


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_long() -> None:
    time.sleep(60)


def fail() -> None:
    raise LookupError("of the task")


def interrupt() -> None:
    """As control-C does."""
    raise KeyboardInterrupt


def nothing() -> None:
    pass


def in_turn(here: int, parts: tuple[Callable[[], None], Callable[[], None]], context: Adder, _: int) -> None:
    """Do one thing in the process of the tests, after a moment in which others begin, and another thing elsewhere."""
    if os.getpid() == here:
        time.sleep(1)
        parts[0]()
    else:
        parts[1]()


def both(here: Callable[[], None], elsewhere: Callable[[], None]) -> list[Any]:
    """Return a task for each of two processes, and one more."""
    return [functools.partial(in_turn, os.getpid(), (here, elsewhere))] * 3


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


def test_a_context_is_sent_once_and_results_can_lead_to_more_tasks() -> None:
    tasks = [functools.partial(add, number) for number in range(12)]
    search, context = Tasks(tasks[:2], tasks[2:]), Adder()
    two_at_once()
    pool = Pool(context, jobs=2)
    pool.run(search.pick, search.done, 100)
    assert sorted(total for _, (total, _, _) in search.found) == list(range(100, 112))
    processes = {process for _, (_, process, _) in search.found}
    assert len(processes) == 2
    assert os.getpid() in processes
    assert sum(max(n for _, (_, p, n) in search.found if p == process) for process in processes) == 12
    assert context.done == 0  # the context itself is only read, by what picks the next task
    assert context.clock.spent["adding"] >= 12 * 0.05
    again = Tasks(tasks[:1])
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


def test_those_that_began_early_are_those_that_work() -> None:
    others = start_workers(3)
    assert others is not None
    assert others.ready(1)
    there = {process.pid for process in workers()}
    search = Tasks([functools.partial(add, number) for number in range(30)])
    Pool(Adder(), jobs=3).run(search.pick, search.done, 0)
    others.stop()
    # Others that were begun anew would be different ones.
    assert {process for _, (_, process, _) in search.found} <= there | {os.getpid()}
    assert start_workers(1) is None


def test_the_caller_says_where_searchrun() -> None:
    search = Tasks([functools.partial(add, number) for number in range(4)])
    with joblib.parallel_config(backend="threading"):
        assert start_workers(2) is None
        Pool(Adder(), jobs=2).run(search.pick, search.done, 0)
    assert {process for _, (_, process, _) in search.found} == {os.getpid()}
    assert max(n for _, (_, _, n) in search.found) == 4


def test_a_worker_that_dies_is_an_error_that_says_so() -> None:
    search, pool = Tasks(both(nothing, die)), two_at_once()
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


def test_nothing_is_left_running_when_it_is_interrupted() -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for here, done in ((interrupt, Tasks([]).done), (nothing, interrupted)):
        search, pool = Tasks(both(here, wait_long)), two_at_once()
        with pytest.raises(KeyboardInterrupt):
            pool.run(search.pick, done, 0)
        assert not gone(workers())


@pytest.mark.parametrize(("here", "elsewhere"), [(fail, nothing), (nothing, fail)])
def test_what_a_task_raises_is_raised(here: Callable[[], None], elsewhere: Callable[[], None]) -> None:
    search = Tasks(both(here, elsewhere))
    with pytest.raises(LookupError, match="of the task"):
        two_at_once().run(search.pick, search.done, 0)


def test_what_a_task_raises_in_a_thread_is_raised() -> None:
    search = Tasks(both(fail, fail))
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
