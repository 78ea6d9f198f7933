"""`Pool`: runs the tasks of a search one after the other in this process, or several at once.

Several tasks at once run on this machine, in this and in other processes (`planner.search.local_workers`), or on the
workers of `joblib.parallel_config` (dask, ray). A worker unpacks the context from bytes once. It then receives small
tasks, runs them on its context and sends their results back. Only this process picks tasks, one at a time, with all
results that have arrived by then.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import io
import multiprocessing
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import joblib
import numpy as np
import numpy.typing as npt
import torch

from planner.errors import JobError, SolverError
from planner.run import gc_pause
from planner.run.stage_clock import Clock
from planner.search.local_workers import EndedError, LocalWorkers, Round, file_for, workers

Tag = TypeVar("Tag")
Result = TypeVar("Result")

Pick = Callable[[], tuple[Tag, Any] | None]
OnResult = Callable[[Tag, Any, Any], None]
Task = Callable[[Any, Any], Result]
"""(context, constraints) -> result."""

Timed = tuple[Result, Mapping[str, float]]
"""(a result, stage of planning -> seconds spent on it)."""

_MAPPED = "64K"
"""From this size on local processes share an array in memory; joblib copies smaller ones."""

_ENGINES = ("distributed", "ray")
"""Packages that run workers: an exception of theirs means that a worker was lost."""


class TaskContext(Protocol):
    """The object that tasks run on. Its caches pass from one task to the next."""

    @property
    def clock(self) -> Clock:
        """The clock that adds up the seconds spent in each stage."""


@dataclass(frozen=True, slots=True)
class _PackedContext:
    """A context as bytes, or a file with these bytes. Two packed contexts are equal if their digests are equal."""

    digest: str
    data: npt.NDArray[np.uint8] | Path = field(compare=False)

    def unpack(self) -> TaskContext:
        """Return a copy of the context."""
        data = self.data.read_bytes() if isinstance(self.data, Path) else self.data.tobytes()
        context: TaskContext = pickle.loads(data)  # noqa: S301  written by `_pack`, in the process that asks
        return context


class _Pickler(pickle.Pickler):
    """A pickler that writes torch ops by their names."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch._ops.OpOverload):
            return _op, (*obj._schema.name.split("::"), obj._overloadname)
        return NotImplemented


def _op(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _pack(context: TaskContext) -> _PackedContext:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(context)
    data = file.getvalue()
    return _PackedContext(hashlib.sha256(data).hexdigest(), np.frombuffer(data, np.uint8))


@functools.lru_cache(maxsize=1)
def _unpacked(packed: _PackedContext) -> TaskContext:
    """Return the context of this worker. It is unpacked once, and cached until another context is sent."""
    context = packed.unpack()
    _keep_large_contexts()
    return context


def _keep_large_contexts() -> None:
    """Stop loky from ending a worker whose context grows.

    loky takes a growth of 300 MB for a leak, ends the worker and starts another. If loky cannot measure memory, it
    collects garbage once a second; ``gc.freeze`` keeps the imported objects out of these collections.
    """
    if multiprocessing.current_process().name.startswith("LokyProcess"):
        sys.modules["loky.process_executor"].__dict__["_MAX_MEMORY_LEAK_SIZE"] = sys.maxsize
        gc.freeze()


_one_at_a_time = threading.Lock()
"""Held while a task runs: with joblib's threading backend several threads share one context."""


def _run_in_worker(packed: _PackedContext, constraints: Any, task: Task[Result]) -> Timed[Result]:
    with _one_at_a_time:
        return _timed(_unpacked(packed), constraints, task)


def _run_numbered(
    digest: str, data: npt.NDArray[np.uint8], constraints: Any, number: int, task: Task[Result]
) -> tuple[int, Timed[Result]]:
    """Return (``number``, result of the task).

    ``data`` is a separate argument because dask sends an array argument only once.
    """
    return number, _run_in_worker(_PackedContext(digest, data), constraints, task)


def _timed(context: TaskContext, constraints: Any, task: Task[Result]) -> Timed[Result]:
    with gc_pause.paused():
        context.clock.spent.clear()
        return task(context, constraints), dict(context.clock.spent)


def _import_tasks() -> int:
    """Import the tasks of a search, and return the process id. Runs in the worker."""
    importlib.import_module("planner.search.mesh_tasks")
    return os.getpid()


def start_workers(jobs: int) -> LocalWorkers | None:
    """Return the worker processes of this process, ready or still starting; None if ``jobs`` needs none."""
    count = joblib.effective_n_jobs(jobs) - 1
    return workers(count, _import_tasks) if count > 0 and _is_local() else None


def _parallel(jobs: int) -> joblib.Parallel:
    """Return a `joblib.Parallel` that asks for one task at a time, and yields results in the order of arrival."""
    backend = joblib.parallel.get_active_backend()[0]
    if backend.supports_retrieve_callback and not backend.supports_return_generator:
        # Ray's backend calls back with each result, which is all that a generator needs. It has the wrong flag only
        # because it inherits from joblib's own pool of processes.
        backend.supports_return_generator = True
    return joblib.Parallel(
        n_jobs=jobs, return_as="generator_unordered", pre_dispatch="n_jobs", batch_size=1, max_nbytes=_MAPPED
    )


def _is_local() -> bool:
    """Return whether tasks run in processes of this machine: the caller has set no other joblib backend."""
    return isinstance(joblib.parallel.get_active_backend()[0], joblib.parallel.LokyBackend)


def checked_jobs(jobs: int) -> int:
    """Return ``jobs``.

    Raises:
        JobError: it is 0.
    """
    if jobs == 0:
        raise JobError("0 jobs would do nothing.", what_to_do="Choose 1 or more, or -1 for all cores.", field="jobs")
    return jobs


class Pool:
    """Runs tasks on a context and its copies, ``jobs`` at once (-1: all cores, as in `joblib.Parallel`)."""

    def __init__(self, context: TaskContext, jobs: int = 1) -> None:
        self._context, self._jobs = context, jobs
        self._packed: _PackedContext | None = None
        self._local_copy: tuple[_PackedContext, TaskContext] | None = None

    def in_this_process(self) -> Pool:
        """Return a pool that runs tasks one after the other, on the context itself."""
        return Pool(self._context)

    def run_one(self, task: Callable[[Any, Any], Result], constraints: Any) -> Result:
        """Return the result of a task that runs in this process."""
        return task(self._context, constraints)

    def run(self, pick: Pick[Tag], on_result: OnResult[Tag], constraints: Any) -> None:
        """Run tasks until no task is left.

        Args:
            pick: returns a tag and the next task; None if there is no task until a running one is done.
            on_result: called with the tag, the task and its result. It never runs at the same time as ``pick``.
            constraints: passed to each task.

        Raises:
            SolverError: a worker died, or was ended by another search.
        """
        if self._jobs == 1 or joblib.effective_n_jobs(self._jobs) == 1:
            while (picked := pick()) is not None:
                on_result(*picked, picked[1](self._context, constraints))
            return
        try:
            if _is_local():
                self._run_locally(pick, on_result, constraints)
            else:
                self._run_elsewhere(pick, on_result, constraints)
        except EndedError as error:
            raise SolverError(
                "the worker processes of the search were ended by another search of this process, which failed.",
                what_to_do="Search again.",
            ) from error
        except Exception as error:
            if not isinstance(error, BrokenExecutor) and type(error).__module__.partition(".")[0] not in _ENGINES:
                raise
            raise SolverError(
                f"a worker process of the search ended before its task did ({type(error).__name__}).",
                what_to_do="Most often memory ran out: search with fewer jobs.",
            ) from error

    def _run_locally(self, pick: Pick[Tag], on_result: OnResult[Tag], constraints: Any) -> None:
        """Run tasks in this process, and in worker processes as soon as these are ready.

        Tasks in this process also run on a copy, because another thread may call ``pick``, which reads the context.
        """
        local_workers = start_workers(self._jobs)
        assert local_workers is not None
        self._local_copy = self._local_copy or self._copy()
        packed, copy = self._local_copy

        def note(tag: Tag, task: Any, timed: Timed[Any]) -> None:
            result, spent = timed
            self._context.clock.add(spent)
            on_result(tag, task, result)

        def elsewhere(task: Any) -> Timed[Any]:
            timed: Timed[Any] = local_workers.run(_run_in_worker, packed, constraints, task)
            return timed

        Round(pick, note, local_workers.stop).run(
            lambda task: _timed(copy, constraints, task),
            [(functools.partial(local_workers.ready, n), elsewhere) for n in range(local_workers.count)],
        )

    def _copy(self) -> tuple[_PackedContext, TaskContext]:
        """Return a file with the context, which exists for as long as this pool, and a copy of the context."""
        packed = _pack(self._context)
        assert not isinstance(packed.data, Path)
        in_file = _PackedContext(packed.digest, file_for(self, packed.data.data))
        return in_file, in_file.unpack()

    def _run_elsewhere(self, pick: Pick[Tag], on_result: OnResult[Tag], constraints: Any) -> None:
        """Run tasks on the workers of `joblib.parallel_config`, with one `joblib.Parallel` for all rounds."""
        self._packed = self._packed or _pack(self._context)
        with _parallel(self._jobs) as parallel:
            while self._run_round(parallel, self._packed, pick, on_result, constraints):
                pass

    def _run_round(
        self,
        parallel: joblib.Parallel,
        packed: _PackedContext,
        pick: Pick[Tag],
        on_result: OnResult[Tag],
        constraints: Any,
    ) -> bool:
        """Run tasks until ``pick`` returns None and all started tasks are done; return whether any task ran."""
        lock, failed = threading.Lock(), list[BaseException]()
        waiting: dict[int, tuple[Tag, Any]] = {}
        started = 0

        def tasks() -> Iterator[Any]:  # joblib asks for the next one in a thread of its own
            nonlocal started
            while True:
                with lock:
                    try:
                        picked = None if failed else pick()
                    except BaseException as error:  # noqa: BLE001  raised below, in the caller's thread
                        failed.append(error)
                        return
                    if picked is None:
                        return
                    started, number = started + 1, started
                    waiting[number] = picked
                yield joblib.delayed(_run_numbered)(packed.digest, packed.data, constraints, number, picked[1])

        results = parallel(tasks())
        try:
            for number, (result, spent) in results:
                with lock:
                    self._context.clock.add(spent)
                    on_result(*waiting.pop(number), result)
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # joblib's, about tasks that are given up
                results.close()
        if failed:
            raise failed[0]
        return started > 0
