"""Tasks of a search, one after the other in this process, or several at once.

At once they are done on this machine, here and in other processes (`planner.search.local_workers`), or where
`joblib.parallel_config` was told to (dask, ray). A worker gets the search once, as bytes, and each task with its few
numbers; what it finds is sent back. Which task comes next is decided here, one at a time, from what was found by then.
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
Done = Callable[[Tag, Any, Any], None]

_MAPPED = "64K"
"""From how many bytes on local processes share an array in memory in place of a copy each."""


class TaskContext(Protocol):
    """What tasks work on; it remembers what one of them found out for the next."""

    @property
    def clock(self) -> Clock:
        """Where the seconds spent are written down."""

    def take(self, terms: Any) -> None:
        """Get ready for tasks under ``terms``."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A bench as bytes, or the file that they are in; two are the same where their digests are."""

    digest: str
    data: npt.NDArray[np.uint8] | Path = field(compare=False)

    def unpacked(self) -> TaskContext:
        """Return a copy of the bench."""
        data = self.data.read_bytes() if isinstance(self.data, Path) else self.data.tobytes()
        found: TaskContext = pickle.loads(data)  # noqa: S301  written by `_packed`, in the process that asks
        return found


class _Pickler(pickle.Pickler):
    """Writes ops by their names."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch._ops.OpOverload):
            return _op, (*obj._schema.name.split("::"), obj._overloadname)
        return NotImplemented


def _op(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _packed(bench: TaskContext) -> _Sent:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(bench)
    data = file.getvalue()
    return _Sent(hashlib.sha256(data).hexdigest(), np.frombuffer(data, np.uint8))


@functools.lru_cache(maxsize=1)
def _unpacked(sent: _Sent) -> TaskContext:
    """Return the bench that was sent: made once in a worker, and kept until another one is sent."""
    found = sent.unpacked()
    _settle()
    return found


def _settle() -> None:
    """Have a worker process of this machine keep what a bench remembers.

    From 300 MB on loky takes it for a leak, ends the worker and begins with another. Or, where it cannot measure that,
    it collects garbage once a second, in all that was imported.
    """
    if multiprocessing.current_process().name.startswith("LokyProcess"):
        sys.modules["loky.process_executor"].__dict__["_MAX_MEMORY_LEAK_SIZE"] = sys.maxsize
        gc.freeze()


_one_at_a_time = threading.Lock()
"""Of threads that share a worker's bench, where the caller has joblib use threads."""


def _work(sent: _Sent, terms: Any, task: Callable[[Any], Result]) -> tuple[Result, Mapping[str, float]]:
    """Return what came of a task, and the seconds spent by stage. Runs in the worker."""
    with _one_at_a_time:
        return _done_on(_unpacked(sent), terms, task)


def _work_numbered(
    sent: _Sent, terms: Any, number: int, task: Callable[[Any], Result]
) -> tuple[int, Result, Mapping[str, float]]:
    """Return the same with the task's number."""
    return number, *_work(sent, terms, task)


def _done_on(bench: TaskContext, terms: Any, task: Callable[[Any], Result]) -> tuple[Result, Mapping[str, float]]:
    with gc_pause.paused():
        bench.take(terms)
        bench.clock.spent.clear()
        return task(bench), dict(bench.clock.spent)


def _ready() -> int:
    """Import what tasks work on, and return the process. Runs in the worker."""
    importlib.import_module("planner.search.worker_context")
    return os.getpid()


def start_workers(jobs: int) -> LocalWorkers | None:
    """Have the processes begin that are to work beside this one, and return them, ready or not; None for no such."""
    others = joblib.effective_n_jobs(jobs) - 1
    return workers(others, _ready) if others > 0 and _is_here() else None


def _parallel(jobs: int) -> joblib.Parallel:
    """Return what hands out one task after the other; with other options joblib would begin with new workers."""
    return joblib.Parallel(
        n_jobs=jobs,
        return_as="generator_unordered",
        pre_dispatch="n_jobs",
        batch_size=1,
        max_nbytes=_MAPPED,
    )


def _is_alone(jobs: int) -> bool:
    return jobs == 1 or joblib.effective_n_jobs(jobs) == 1


def _is_here() -> bool:
    """Tell whether nobody has said that tasks run elsewhere than in processes of this machine."""
    return isinstance(joblib.parallel.get_active_backend()[0], joblib.parallel.LokyBackend)


def checked_jobs(jobs: int) -> int:
    """Return ``jobs``.

    Raises:
        JobError: it is no number of processes.
    """
    if jobs == 0:
        raise JobError("0 jobs would do nothing.", what_to_do="Choose 1 or more, or -1 for all cores.", field="jobs")
    return jobs


class Pool:
    """Does tasks on a bench, and on copies of it ``jobs`` at once (as `joblib.Parallel` counts them)."""

    def __init__(self, bench: TaskContext, jobs: int = 1) -> None:
        self._bench, self._jobs = bench, jobs
        self._terms: Any = None
        self._sent: _Sent | None = None
        self._here: tuple[_Sent, TaskContext] | None = None

    def under(self, terms: Any) -> Pool:
        """Return this pool, ready for tasks under ``terms``."""
        self._terms = terms
        self._bench.take(terms)
        return self

    def do(self, task: Callable[[Any], Result]) -> Result:
        """Do a task in this process, and return what came of it."""
        return task(self._bench)

    def run(self, pick: Pick[Tag], done: Done[Tag]) -> None:
        """Do tasks until none is left.

        Args:
            pick: what comes next and the task for it; None where there is none as long as nothing more is found.
            done: told what was next, the task and what came of it. Neither is called while the other is at work.

        Raises:
            SolverError: a worker died, or was ended by another search.
        """
        if _is_alone(self._jobs):
            while (picked := pick()) is not None:
                done(*picked, picked[1](self._bench))
            return
        try:
            if _is_here():
                self._run_here(pick, done)
                return
            self._sent = self._sent or _packed(self._bench)
            while self._round(self._sent, pick, done):
                pass
        except BrokenExecutor as error:
            raise SolverError(
                f"a worker process of the search ended before its task did ({type(error).__name__}).",
                what_to_do="Most often memory ran out: search with fewer jobs.",
            ) from error
        except EndedError as error:
            raise SolverError(
                "the worker processes of the search were ended by another search of this process, which failed.",
                what_to_do="Search again.",
            ) from error

    def _run_here(self, pick: Pick[Tag], done: Done[Tag]) -> None:
        """Do tasks in this process, and in others as soon as they are ready.

        Here they work on a copy too: the bench itself is at hand for who picks, meanwhile and in another thread.
        """
        others = start_workers(self._jobs)
        assert others is not None
        self._here = self._here or self._filed()
        (sent, copy), terms = self._here, self._terms

        def note(tag: Tag, task: Any, result: tuple[Any, Mapping[str, float]]) -> None:
            found, spent = result
            self._bench.clock.add(spent)
            done(tag, task, found)

        def elsewhere(task: Any) -> tuple[Any, Mapping[str, float]]:
            found: tuple[Any, Mapping[str, float]] = others.do(_work, sent, terms, task)
            return found

        Round(pick, note, others.stop).run(
            lambda task: _done_on(copy, terms, task),
            [(functools.partial(others.ready, n), elsewhere) for n in range(others.count)],
        )

    def _filed(self) -> tuple[_Sent, TaskContext]:
        """Return the bench as a file, there for as long as this pool, and a copy of it."""
        sent = _packed(self._bench)
        assert not isinstance(sent.data, Path)
        filed = _Sent(sent.digest, file_for(self, sent.data.data))
        return filed, filed.unpacked()

    def _round(self, sent: _Sent, pick: Pick[Tag], done: Done[Tag]) -> bool:
        """Do tasks until ``pick`` has none and all that were begun are done; return whether there was any."""
        lock, failed = threading.Lock(), list[BaseException]()
        waiting: dict[int, tuple[Tag, Any]] = {}
        begun = 0

        def tasks() -> Iterator[Any]:  # joblib asks for the next one in a thread of its own
            nonlocal begun
            while True:
                with lock:
                    try:
                        picked = None if failed else pick()
                    except BaseException as error:  # noqa: BLE001  raised below, in the caller's thread
                        failed.append(error)
                        return
                    if picked is None:
                        return
                    begun, number = begun + 1, begun
                    waiting[number] = picked
                yield joblib.delayed(_work_numbered)(sent, self._terms, number, picked[1])

        results = _parallel(self._jobs)(tasks())
        try:
            for number, result, spent in results:
                with lock:
                    self._bench.clock.add(spent)
                    done(*waiting.pop(number), result)
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # joblib's, where some are given up
                results.close()
        if failed:
            raise failed[0]
        return begun > 0
