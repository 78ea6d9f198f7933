"""Tasks done at once on this machine: in this process, and in others beside it.

This process works like the others, so that where two tasks may go on at once only one other process has to begin, and
to find out for itself what is remembered here. Whoever is done with a task decides what comes next, one at a time.
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
"""After so long without any task a process ends."""

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class EndedError(RuntimeError):
    """Processes were ended by another who had a task of theirs fail."""


class LocalWorkers:
    """Some processes beside this one, as `workers` has them."""

    def __init__(self, count: int) -> None:
        self.count = count
        threads = str(max((os.cpu_count() or 1) // (count + 1), 1))
        env = {name: os.environ.get(name, threads) for name in _THREADS}
        self._executor = ProcessPoolExecutor(max_workers=count, timeout=_IDLE_S, env=env)
        self._ready: list[Future[int]] = []

    def begin(self, get_ready: Callable[[], int]) -> bool:
        """Have the processes begin that are not there; return whether that is possible.

        Args:
            get_ready: what each does first; returns the process.
        """
        try:
            self._ready = [self._executor.submit(get_ready) for _ in range(self.count)]
        except (BrokenExecutor, ShutdownExecutorError):
            return False
        return True

    def ready(self, number: int) -> int:
        """Wait until as many processes as ``number`` and one more are ready; return the last of them.

        Raises:
            BrokenExecutor: a process died.
            EndedError: all were ended.
        """
        process: int = _result_of(self._ready[number])
        return process

    def do(self, task: Callable[..., Any], *given: Any) -> Any:
        """Return what comes of a task that one of the processes does.

        Raises:
            BrokenExecutor: the process died.
            EndedError: all were ended.
        """
        try:
            return _result_of(self._executor.submit(task, *given))
        except ShutdownExecutorError as error:
            raise EndedError(str(error)) from error

    def stop(self) -> None:
        """End the processes, whatever they do."""
        self._executor.shutdown(wait=True, kill_workers=True)


def _result_of(future: Future[Any]) -> Any:
    try:
        return future.result()
    except ShutdownExecutorError as error:
        raise EndedError(str(error)) from error


_kept: dict[int, LocalWorkers] = {}
_one_at_a_time = threading.Lock()


def workers(count: int, get_ready: Callable[[], int]) -> LocalWorkers:
    """Return ``count`` processes, which begin now if they are not there: the same for all in this process who ask.

    Args:
        get_ready: what each does first; returns the process.
    """
    with _one_at_a_time:
        found = _kept.get(count)
        if found is None or not found.begin(get_ready):
            found = _kept[count] = LocalWorkers(count)
            found.begin(get_ready)
        return found


def file_for(owner: object, data: memoryview) -> Path:
    """Return a file with ``data``, there for as long as ``owner`` is, and not after this process, however it ends."""
    handle, name = tempfile.mkstemp(prefix="shardplan-")
    resource_tracker.register(name, "file")
    weakref.finalize(owner, resource_tracker.maybe_unlink, name, "file")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    return Path(name)


class Round(Generic[Tag]):
    """Tasks that are picked, done and noted until none is left.

    Attributes:
        failed: what was raised first, by a task or by those who pick and note them.
    """

    def __init__(
        self,
        pick: Callable[[], tuple[Tag, Any] | None],
        done: Callable[[Tag, Any, Any], None],
        stop: Callable[[], None],
    ) -> None:
        """Take what says which task comes next, what is told of its result, and what ends all others after a failure.

        Args:
            pick: None where there is none as long as nothing more is found.
            done: told what was picked and what came of it. Neither is called while the other is at work.
        """
        self.failed: BaseException | None = None
        self._pick, self._done, self._stop = pick, done, stop
        self._changed = threading.Condition()
        self._busy = 0
        self._is_over = False

    def run(
        self, here: Callable[[Any], Any], others: Sequence[tuple[Callable[[], object], Callable[[Any], Any]]]
    ) -> None:
        """Do tasks ``here``, in this thread, and as each of ``others`` does them once it is ready; raise what failed.

        Args:
            others: what waits until one is ready, and what does a task there.
        """
        try:
            for begin, do in others:
                threading.Thread(target=self._join, args=(begin, do), daemon=True).start()
            self._work(here)
        except BaseException as error:  # noqa: BLE001  an interruption, raised below
            self._fail(error)
        with self._changed:
            self._is_over = True
        if self.failed is not None:
            raise self.failed

    def _join(self, begin: Callable[[], object], do: Callable[[Any], Any]) -> None:
        try:
            begin()
        except BaseException as error:  # noqa: BLE001  raised in the thread that runs the round
            self._fail(error)
        self._work(do)

    def _work(self, do: Callable[[Any], Any]) -> None:
        while (picked := self._next()) is not None:
            tag, task = picked
            try:
                found = do(task)
                with self._changed:
                    if self.failed is None:
                        self._done(tag, task, found)
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
