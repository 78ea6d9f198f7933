"""Gloo process groups that neither corrupt memory nor abort the process at its end; checked with torch 2.13."""

from __future__ import annotations

import atexit
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

_END_S = 0.05
"""Seconds: ten times as long as Python lets a thread keep its lock while another asks for it."""


def run_one_worker_per_gloo_group() -> None:
    """Give each gloo group that this process creates from now on one worker thread, not torch's two; idempotent.

    In torch 2.13 each worker writes the name of the op that it has completed into one string of its group, without a
    lock. Two workers at once free the string's memory twice, or write to it once it is freed, and the process dies of
    ``malloc(): unaligned tcache chunk detected`` or a segmentation fault, here once in a few thousand steps.

    A worker also needs Python's lock to free the tensors of its last collective, and aborts a process that ends before:
    torch keeps groups with functional collectives for ever. So the end of the process waits a moment.
    """
    if dist.is_gloo_available() and not isinstance(distributed_c10d.ProcessGroupGloo, _OneWorker):
        setattr(distributed_c10d, "ProcessGroupGloo", _OneWorker("OneWorkerProcessGroupGloo", (), {}))  # noqa: B010
        atexit.register(time.sleep, _END_S)


class _OneWorker(type):
    """The class of a class whose instances are torch's own groups, made with other options than torch makes them."""

    def __call__(cls, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        group: Any = dist.ProcessGroupGloo
        options = group._Options()
        options._devices, options._threads, options._timeout = [group.create_default_device()], 1, timeout
        return group(store, rank, size, options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo)
