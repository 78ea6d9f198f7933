"""Worker processes on this machine, and rounds of tasks that run on them and in this process.

This process runs tasks too. So two tasks at once need only one worker process, which takes time to start and to fill
its caches. A thread that has finished a task picks the next one. Only one thread picks at a time.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from loky import ProcessPoolExecutor
from loky.backend import resource_tracker
from loky.process_executor import ShutdownExecutorError

Tag = TypeVar("Tag")

_IDLE_S = 300
"""Seconds without a task after which a worker process ends."""

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class EndedError(RuntimeError):
    """The worker processes were ended by another search, because one of its tasks failed."""


class LocalWorkers:
    """A pool of worker processes on this machine; see `workers`."""

    def __init__(self, count: int) -> None:
        self.count = count
        threads = str(max((os.cpu_count() or 1) // (count + 1), 1))
        env = {name: os.environ.get(name, threads) for name in _THREADS}
        self._executor = ProcessPoolExecutor(max_workers=count, timeout=_IDLE_S, env=env)
        self._ready: list[Future[int]] = []

    def start(self, get_ready: Callable[[], int]) -> bool:
        """Start the processes that do not run yet; return False if the pool is broken.

        Args:
            get_ready: the function that each process runs first. It returns the process id.
        """
        try:
            self._ready = [self._executor.submit(get_ready) for _ in range(self.count)]
        except (BrokenExecutor, ShutdownExecutorError):
            return False
        return True

    def ready(self, number: int) -> int:
        """Wait until ``number`` + 1 processes are ready; return the id of the last one.

        Raises:
            BrokenExecutor: a process died.
            EndedError: another search ended all processes.
        """
        process: int = _result_of(self._ready[number])
        return process

    def run(self, task: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a task that one of the processes runs.

        Raises:
            BrokenExecutor: the process died.
            EndedError: another search ended all processes.
        """
        try:
            return _result_of(self._executor.submit(task, *args))
        except ShutdownExecutorError as error:
            raise EndedError(str(error)) from error

    def stop(self) -> None:
        """End the processes at once."""
        self._executor.shutdown(wait=True, kill_workers=True)


def _result_of(future: Future[Any]) -> Any:
    try:
        return future.result()
    except ShutdownExecutorError as error:
        raise EndedError(str(error)) from error


_workers: dict[int, LocalWorkers] = {}
_one_at_a_time = threading.Lock()


def workers(count: int, get_ready: Callable[[], int]) -> LocalWorkers:
    """Return ``count`` worker processes, started if they do not run yet. All searches of this process share them.

    Args:
        count: number of processes.
        get_ready: the function that each process runs first. It returns the process id.
    """
    with _one_at_a_time:
        local = _workers.get(count)
        if local is None or not local.start(get_ready):
            local = _workers[count] = LocalWorkers(count)
            local.start(get_ready)
        return local


def file_for(owner: object, data: memoryview) -> Path:
    """Return a temporary file with ``data``. It is deleted with ``owner``, or when this process ends."""
    handle, name = tempfile.mkstemp(prefix="shardplan-")
    resource_tracker.register(name, "file")
    weakref.finalize(owner, resource_tracker.maybe_unlink, name, "file")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    return Path(name)


class Round(Generic[Tag]):
    """One round of tasks: picks tasks, runs them and takes their results until no task is left.

    Attributes:
        failed: the first exception that a task, ``pick`` or ``on_result`` raised; None: no exception so far.
    """

    def __init__(
        self,
        pick: Callable[[], tuple[Tag, Any] | None],
        on_result: Callable[[Tag, Any, Any], None],
        stop: Callable[[], None],
    ) -> None:
        """Prepare a round.

        Args:
            pick: returns a tag and the next task; None if there is no task until a running one is done.
            on_result: called with the tag, the task and its result. It never runs at the same time as ``pick``.
            stop: ends the worker processes after a failure.
        """
        self.failed: BaseException | None = None
        self._pick, self._on_result, self._stop = pick, on_result, stop
        self._changed = threading.Condition()
        self._busy = 0
        self._is_over = False

    def run(
        self, here: Callable[[Any], Any], other_workers: Sequence[tuple[Callable[[], object], Callable[[Any], Any]]]
    ) -> None:
        """Run tasks in this thread and on other workers until no task is left; raise the first exception.

        Args:
            here: runs a task in this thread.
            other_workers: for each worker, (a function that waits until the worker is ready, a function that runs a
                task on the worker).
        """
        try:
            for wait_ready, run in other_workers:
                threading.Thread(target=self._join, args=(wait_ready, run), daemon=True).start()
            self._work(here)
        except BaseException as error:  # noqa: BLE001  an interruption, raised below
            self._fail(error)
        with self._changed:
            self._is_over = True
        if self.failed is not None:
            raise self.failed

    def _join(self, wait_ready: Callable[[], object], run: Callable[[Any], Any]) -> None:
        try:
            wait_ready()
        except BaseException as error:  # noqa: BLE001  raised in the thread that runs the round
            self._fail(error)
        self._work(run)

    def _work(self, run: Callable[[Any], Any]) -> None:
        while (picked := self._next()) is not None:
            tag, task = picked
            try:
                result = run(task)
                with self._changed:
                    if self.failed is None:
                        self._on_result(tag, task, result)
            except BaseException as error:  # noqa: BLE001  raised in the thread that runs the round
                self._fail(error)
            finally:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def _next(self) -> tuple[Tag, Any] | None:
        with self._changed:
            while self.failed is None and not self._is_over:
                try:
                    picked = self._pick()
                except BaseException as error:  # noqa: BLE001  likewise
                    self._fail(error)
                    return None
                if picked is not None:
                    self._busy += 1
                    return picked
                if not self._busy:
                    return None
                self._changed.wait()
        return None

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            first = self.failed is None and not self._is_over
            self.failed = self.failed or error
            self._changed.notify_all()
        if first:
            self._stop()
