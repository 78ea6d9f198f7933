"""`PlanExchange`: values of all ranks for the first one, and the first one's answer for all, through their store.

Collectives have time limits that planning may exceed, and need a process group, in which no plan can be verified. The
store has neither. While the first rank works, a thread of it counts up a beat, by which the others know that it lives.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from cost_model.hardware.reading import ClusterError
from cost_model.layouts.layout import LayoutError
from executor.launch.program import Program
from executor.torch_internals.store import PrefixStore, put
from planner.errors import PlanError, PlannerError

BEAT_S = 2.0
"""Seconds between two beats of the first rank."""

LOOKS_S = (0.01, 1.0)
"""Seconds between two looks into the store, at first and at most: each look is a request to one server."""

SILENCE_S = 60.0
"""Seconds without a beat after which the first rank counts as dead."""

GATHER_S = 600.0
"""Seconds that all ranks have to come to the first call: they may still read weights."""


class PlanExchange:
    """One round of values and answer. All ranks of a program make the same number of them, in the same order."""

    def __init__(self, program: Program) -> None:
        self._program = program
        group = ",".join(map(str, program.ranks))
        round_ = program.store.add(f"shardplan/{group}/{program.rank}", 1)
        self._store = PrefixStore(f"shardplan/{group}/{round_}", program.store)

    def gather(self, value: bytes) -> list[bytes]:
        """Return the values of all ranks, in the ranks' order, on the first one; on the others nothing.

        Raises:
            PlanError: a rank did not come in time; the message names those that did not.
        """
        put(self._store, f"value/{self._program.rank}", value)
        if not self._program.is_first:
            return []
        keys = {rank: f"value/{rank}" for rank in self._program.ranks}
        for waited_s in _looks():
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            if not missing:
                break
            if waited_s > GATHER_S:
                raise PlanError(
                    f"Of {len(keys)} ranks, {', '.join(map(str, missing))} did not call this within {GATHER_S:.0f} s.",
                    what_to_do="Call it on every rank of the program, equally often; read what those ranks printed.",
                )
        return [self._store.get(key) for key in keys.values()]

    def from_first(self, work: Callable[[], bytes]) -> bytes:
        """Return on all ranks what ``work`` returns on the first one.

        Raises:
            Exception: on all ranks, what ``work`` raised; an error that is not one of shardplan's is a `PlanError` on
                the others. `PlanError`: the first rank died.
        """
        if not self._program.is_first:
            return self._wait()
        with self._beating():
            try:
                answer = work()
            except BaseException as error:
                put(self._store, "answer", b"E" + pickle.dumps(_for_others(error, self._program.rank)))
                raise
            put(self._store, "answer", b"A" + answer)
        return answer

    def _wait(self) -> bytes:
        """Return the first rank's answer.

        Raises:
            Exception: as `from_first`.
        """
        beat, heard_s = b"", 0.0
        try:
            for waited_s in _looks():
                if self._store.check(["answer"]):
                    break
                latest = self._store.get("beat") if self._store.check(["beat"]) else b""
                if latest != beat:
                    beat, heard_s = latest, waited_s
                elif waited_s - heard_s > SILENCE_S:
                    raise _dead(self._program.ranks[0], f"has given no sign of life for {SILENCE_S:.0f} s")
            answer: bytes = self._store.get("answer")
        except dist.DistNetworkError as error:
            raise _dead(self._program.ranks[0], "has ended, or the program's store has") from error
        if answer[:1] == b"E":
            raise pickle.loads(answer[1:])  # noqa: S301 - a pickle of ours, from this program's own store
        return answer[1:]

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Return a context in which a thread counts up the beat."""
        ended = threading.Event()

        def beat() -> None:
            count = 0
            while not ended.wait(BEAT_S):
                count += 1
                with suppress(RuntimeError):  # the store ends with the program
                    self._store.set("beat", str(count))

        thread = threading.Thread(target=beat, name="shardplan-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _looks() -> Iterator[float]:
    """Yield the seconds waited so far, after pauses that grow."""
    start, pause_s = time.monotonic(), LOOKS_S[0]
    while True:
        yield time.monotonic() - start
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOKS_S[1])


def _for_others(error: BaseException, rank: int) -> Exception:
    """Return the error that other ranks raise for ``error`` of the first ``rank``: itself, if they know its class."""
    if isinstance(error, PlannerError | ClusterError | LayoutError):
        return error
    return PlanError(
        f"Rank {rank} failed while it planned: {type(error).__name__}: {error}.",
        what_to_do="Its traceback is in its own output.",
    )


def _dead(rank: int, what: str) -> PlanError:
    advice = "Read what it printed last, and start the program again."
    return PlanError(f"Rank {rank}, which plans for all, {what}.", what_to_do=advice)
