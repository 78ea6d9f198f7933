"""DTensor's flag for implicit replication: it is on during a run, and while an autograd graph of a run is alive."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from executor.torch_internals import dtensor as torch_internals


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Return a context in which DTensor treats plain tensors as replicated. Unlike torch's own, it can be nested."""
    holders = _this_thread.holders
    holders.acquire()
    try:
        yield
    finally:
        holders.release()


def hold_for_backward(outputs: Iterable[torch.Tensor]) -> None:
    """Keep the flag on until the autograd graphs of ``outputs`` are freed.

    A backward pass needs the flag from its start: the engine runs every node with the flag as it was when the pass
    began, so a hook on a gradient would set it too late.
    """
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    if not nodes:
        return
    graph = _Graph()
    for node in nodes:
        metadata: Any = node.metadata
        metadata[graph] = graph
    holders = _this_thread.holders
    holders.acquire()
    weakref.finalize(graph, holders.release)


class _Graph:
    """An object that lives as long as the autograd nodes that store it in their metadata."""


class _Holders:
    """Counts the runs and graphs, of all models, that keep one thread's flag on; the last one restores the flag.

    torch has one flag per thread. If another thread frees the last graph, the count falls to zero, but that thread
    cannot restore this thread's flag. The flag then stays on until this thread's count falls to zero again.
    """

    def __init__(self) -> None:
        self._count = 0
        self._is_on = False
        self._before = False

    def acquire(self) -> None:
        if not self._is_on:
            self._before = torch_internals.allows_implicit_replication()
            self._is_on = True
        self._count += 1
        torch_internals.allow_implicit_replication(True)

    def release(self) -> None:
        self._count -= 1
        if self._count == 0 and _this_thread.holders is self:
            self._is_on = False
            torch_internals.allow_implicit_replication(self._before)


class _Thread(threading.local):
    """The ``_Holders`` of the current thread. They are global state, as torch's flag is."""

    def __init__(self) -> None:
        self.holders = _Holders()


_this_thread = _Thread()
