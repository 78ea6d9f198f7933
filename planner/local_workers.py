"""Tasks done at once on this machine: in this process, and in others beside it.

This process works like the others, so that where two tasks may go on at once only one other process has to begin, and
to find out for itself what is remembered here. Whoever is done with a task decides what comes next, one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from loky import get_reusable_executor

Tag = TypeVar("Tag")

_IDLE_S = 300
"""After so long without any task a process ends."""


class LocalWorkers:
    """Processes that are kept for the next round of tasks: the same for all who ask for as many."""

    def __init__(self, count: int, get_ready: Callable[[], int]) -> None:
        """Have ``count`` processes begin.

        Args:
            get_ready: what each does first; returns the process.
        """
        self.count, self._get_ready = count, get_ready
        self._executor: Any = None
        self._ready: list[Future[int]] = []
        self.begin()

    def begin(self) -> None:
        """Have the processes begin that are not there."""
        executor = get_reusable_executor(max_workers=self.count, timeout=_IDLE_S)
        if executor is not self._executor:
            self._executor = executor
            self._ready = [executor.submit(self._get_ready) for _ in range(self.count)]

    def ready(self, number: int) -> int:
        """Wait until as many processes as ``number`` and one more are ready; return the last of them."""
        return self._ready[number].result()

    def do(self, task: Callable[..., Any], *given: Any) -> Any:
        """Return what comes of a task that one of the processes does."""
        return self._executor.submit(task, *given).result()

    def stop(self) -> None:
        """End the processes, whatever they do."""
        self._executor.shutdown(wait=True, kill_workers=True)


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
        for begin, do in others:
            threading.Thread(target=self._join, args=(begin, do), daemon=True).start()
        try:
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
