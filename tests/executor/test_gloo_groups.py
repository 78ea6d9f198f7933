"""Gloo groups have one worker thread: torch's two write to one string without a lock, and the process dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
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


SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import executor.resolve.mesh

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
for _ in range(10):
    started = [funcol.all_reduce(torch.ones(16), "sum", dist.group.WORLD) for _ in range(4)]
    assert all(each.sum().item() == 32 for each in started)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not list(Path("/usr/lib").glob("*/libc_malloc_debug.so.0")), reason="glibc's malloc checks")
def test_a_process_that_ends_after_its_last_collective_ends_well(tmp_path: Path) -> None:
    """Workers are late where malloc is slow: without the pause at the end most of these processes are aborted."""
    checks = {**os.environ, "LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}
    for attempt in range(4):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / f"store-{attempt}")]
        ranks = [subprocess.Popen([*command, str(rank)], env=checks) for rank in range(2)]
        assert [rank.wait(60) for rank in ranks] == [0, 0]
