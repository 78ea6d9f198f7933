"""DTensor's flag for implicit replication: on while some run needs it, or a graph lives that could be run backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from executor import torch_internals


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Have DTensor take plain tensors as replicated; torch's own context cannot be nested."""
    holders = _this_thread.holders
    holders.acquire()
    try:
        yield
    finally:
        holders.release()


def hold_for_backward(outputs: Iterable[torch.Tensor]) -> None:
    """Keep the flag on until the graphs that ``outputs`` end are freed.

    A backward pass needs it from the start: the engine gives each of its nodes the flag as it was when the pass began,
    so that no hook on a gradient can set it.
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
    """Lives as long as the autograd nodes whose metadata it is in."""


class _Holders:
    """How many want the flag on in one thread, of whichever models, and how it was before the first of them.

    torch keeps one flag for each thread. A graph that another thread frees no longer counts, but cannot clear it: that
    is done when the last of this thread's next holders lets go.
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
    """What this thread counts: state of the process, as the flag itself is."""

    def __init__(self) -> None:
        self.holders = _Holders()


_this_thread = _Thread()
