"""Gloo process groups that do not corrupt memory; checked with torch 2.13."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store


def run_one_worker_per_gloo_group() -> None:
    """Give each gloo group that this process creates from now on one worker thread, not torch's two; idempotent.

    In torch 2.13 each worker writes the name of the op that it has completed into one string of its group, without a
    lock. Two workers at once free the string's memory twice, or write to it once it is freed, and the process dies of
    ``malloc(): unaligned tcache chunk detected`` or a segmentation fault, here once in a few thousand steps.
    """
    if dist.is_gloo_available() and not issubclass(distributed_c10d.ProcessGroupGloo, _OneWorker):
        original = distributed_c10d.ProcessGroupGloo
        name = "OneWorkerProcessGroupGloo"
        setattr(distributed_c10d, "ProcessGroupGloo", type(name, (_OneWorker, original), {}))  # noqa: B010 - a type


class _OneWorker:
    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        group: Any = dist.ProcessGroupGloo
        options = group._Options()
        options._devices, options._threads, options._timeout = [group.create_default_device()], 1, timeout
        super().__init__(store, rank, size, options)  # type: ignore[call-arg]
