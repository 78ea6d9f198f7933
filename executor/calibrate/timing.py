"""Seconds of a call on every rank at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist


def time_s(run: Callable[[], object], device: torch.device, repeats: int, least_s: float = 0.0) -> float:
    """Return the seconds of ``run`` after two calls to warm up; all ranks begin together.

    Of a GPU's events the median counts. Processes of a CPU may share cores, and then a short call is either
    undisturbed or stopped for long: only the mean over many says what a step will see.

    Args:
        repeats: calls at least.
        least_s: seconds that they take together at least, on a CPU; 0 where all ranks must call equally often.
    """
    for _ in range(2):
        run()
    dist.barrier()
    if device.type != "cpu":
        return median(_event_s(run) for _ in range(repeats))
    calls = 0
    begin = time.perf_counter()
    while calls < repeats or time.perf_counter() - begin < least_s:
        run()
        calls += 1
    return (time.perf_counter() - begin) / calls


def _event_s(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def of_ranks(seconds: float) -> float:
    """Return the slowest rank's ``seconds``, on all ranks: a step waits for it, at every collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, seconds)
    return float(max(found))
