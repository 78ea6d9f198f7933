"""Gloo groups have one worker thread: torch's two write to one string without a lock, and the process dies."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.gloo import run_on_gloo


def _count_new_threads(rank: int) -> int:
    before = len(os.listdir("/proc/self/task"))
    dist.new_group([0, 1])
    return len(os.listdir("/proc/self/task")) - before


def _overlap(rank: int, steps: int) -> bool:
    group, x = dist.group.WORLD, torch.ones(16)
    right = True
    for _ in range(steps):
        gathered, reduced = funcol.all_gather_single(x, 0, group), funcol.all_reduce(x, "sum", group)
        right = right and gathered.sum().item() == 32 and reduced.sum().item() == 32
    return right


def test_each_group_has_one_worker_thread() -> None:
    assert run_on_gloo(_count_new_threads, 2) == [2, 2]  # a worker, and the loop of the group's device


def test_collectives_that_overlap_return_what_they_should() -> None:
    assert run_on_gloo(_overlap, 2, 200) == [True, True]
