"""Seconds of a call that all ranks make at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist


def time_s(run: Callable[[], object], device: torch.device, repeats: int, least_s: float = 0.0) -> float:
    """Return the seconds of one call of ``run``, after two calls to warm up; all ranks begin together.

    On a GPU the result is the median of all calls. On a CPU it is the mean: processes may share cores, so a short call
    is either undisturbed or interrupted for long, and only the mean of many calls is what a training step sees.

    Args:
        run: the call.
        device: the device on which ``run`` works.
        repeats: minimum number of calls; on a GPU the exact number.
        least_s: minimum total seconds of the calls on a CPU; 0 where all ranks must make equally many calls.
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


def slowest_rank_s(seconds: float) -> float:
    """Return the largest ``seconds`` of all ranks: a step waits for the slowest rank at every collective."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, seconds)
    return float(max(by_rank))
