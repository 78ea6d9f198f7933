"""Tasks of a search, one after the other in this process, or several at once in others through joblib.

What joblib starts is its own affair: local processes, or what `joblib.parallel_config` was told (dask, ray). A worker
is sent the search once, as bytes, and each task with its few numbers; what it finds is sent back. Which task comes next
is decided here, one at a time, from what was found by then.
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
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import joblib
import numpy as np
import numpy.typing as npt
import torch

from planner import collector
from planner.clock import Clock
from planner.errors import JobError, SolverError

Tag = TypeVar("Tag")
Result = TypeVar("Result")

Pick = Callable[[], tuple[Tag, Any] | None]
Done = Callable[[Tag, Any, Any], None]

_MAPPED = "64K"
"""From how many bytes on local processes share an array in memory in place of a copy each."""


class Bench(Protocol):
    """What tasks work on; it remembers what one of them found out for the next."""

    @property
    def clock(self) -> Clock:
        """Where the seconds spent are written down."""

    def take(self, terms: Any) -> None:
        """Get ready for tasks under ``terms``."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A bench as bytes; two are the same where their digests are."""

    digest: str
    data: npt.NDArray[np.uint8] = field(compare=False)


class _Pickler(pickle.Pickler):
    """Writes ops by their names."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch._ops.OpOverload):
            return _op, (*obj._schema.name.split("::"), obj._overloadname)
        return NotImplemented


def _op(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _packed(bench: Bench) -> _Sent:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(bench)
    data = file.getvalue()
    return _Sent(hashlib.sha256(data).hexdigest(), np.frombuffer(data, np.uint8))


@functools.lru_cache(maxsize=1)
def _unpacked(sent: _Sent) -> Bench:
    """Return the bench that was sent: made once in a worker, and kept until another one is sent."""
    found: Bench = pickle.loads(sent.data.tobytes())  # noqa: S301  written by `_packed`, in the process that asks
    _settle()
    return found


_LOKY = "joblib.externals.loky.process_executor"


def _settle() -> None:
    """Have joblib's own worker processes keep what a bench remembers.

    From 300 MB on joblib takes it for a leak, ends the worker and begins with another. Or, where it cannot measure
    that, it collects garbage once a second, in all that was imported.
    """
    if multiprocessing.current_process().name.startswith("LokyProcess") and _LOKY in sys.modules:
        sys.modules[_LOKY].__dict__["_MAX_MEMORY_LEAK_SIZE"] = sys.maxsize
        gc.freeze()


_one_at_a_time = threading.Lock()
"""Of threads that share a worker's bench, where the caller has joblib use threads."""


def _work(
    sent: _Sent, terms: Any, number: int, task: Callable[[Any], Result]
) -> tuple[int, Result, Mapping[str, float]]:
    """Return the task's number, what came of it, and the seconds spent by stage. Runs in the worker."""
    with _one_at_a_time, collector.put_off():
        bench = _unpacked(sent)
        bench.take(terms)
        bench.clock.spent.clear()
        result = task(bench)
        return number, result, dict(bench.clock.spent)


def _ready() -> int:
    """Import what tasks work on, and return the process. Runs in the worker."""
    importlib.import_module("planner.bench")
    return os.getpid()


class Starting:
    """Workers that import what they need, while this process does other things. Iterating waits until they have."""

    def __init__(self, jobs: int) -> None:
        """Have ``jobs`` workers begin, where these are not this process."""
        workers = 0 if _is_local(jobs) else joblib.effective_n_jobs(jobs)
        self._processes: Iterable[int] = ()
        if workers:
            self._processes = _parallel(jobs)(joblib.delayed(_ready)() for _ in range(workers))
            weakref.finalize(self, _closed, self._processes)

    def __iter__(self) -> Iterator[int]:
        """Yield their processes."""
        yield from self._processes


def _closed(results: Any) -> None:
    """End a round of tasks; joblib warns where some are given up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        results.close()


def _parallel(jobs: int) -> joblib.Parallel:
    """Return what hands out one task after the other; with other options joblib would begin with new workers."""
    return joblib.Parallel(
        n_jobs=jobs,
        return_as="generator_unordered",
        pre_dispatch="n_jobs",
        batch_size=1,
        max_nbytes=_MAPPED,
    )


def _is_local(jobs: int) -> bool:
    return jobs == 1 or joblib.effective_n_jobs(jobs) == 1


def checked_jobs(jobs: int) -> int:
    """Return ``jobs``.

    Raises:
        JobError: it is no number of processes.
    """
    if jobs == 0:
        raise JobError("0 jobs would do nothing.", what_to_do="Choose 1 or more, or -1 for all cores.", field="jobs")
    return jobs


class Pool:
    """Does tasks on a bench, and on copies of it in ``jobs`` workers (as `joblib.Parallel` counts them)."""

    def __init__(self, bench: Bench, jobs: int = 1, begun: Starting | None = None) -> None:
        """Take the bench.

        Args:
            begun: workers that were told to begin already.
        """
        self._bench, self._jobs, self._begun = bench, jobs, begun
        self._terms: Any = None
        self._sent: _Sent | None = None

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
            SolverError: a worker died.
        """
        if _is_local(self._jobs):
            while (picked := pick()) is not None:
                done(*picked, picked[1](self._bench))
            return
        self._sent = self._sent or _packed(self._bench)
        try:
            for _ in self._begun or ():
                pass
            while self._round(self._sent, pick, done):
                pass
        except BrokenExecutor as error:
            raise SolverError(
                f"a worker process of the search ended before its task did ({type(error).__name__}).",
                what_to_do="Most often memory ran out: search with fewer jobs.",
            ) from error

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
                yield joblib.delayed(_work)(sent, self._terms, number, picked[1])

        results = _parallel(self._jobs)(tasks())
        try:
            for number, result, spent in results:
                with lock:
                    self._bench.clock.add(spent)
                    done(*waiting.pop(number), result)
        finally:
            _closed(results)
        if failed:
            raise failed[0]
        return begun > 0
