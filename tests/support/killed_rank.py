"""Run a function on gloo processes of which one is killed: what do the others raise, and when?"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from support.gloo import _rank_main

WITHIN_S = 60.0


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def errors_of_survivors(fn: Callable[..., Any], world_size: int, *args: Any) -> dict[int, str]:
    """Return the traceback of every rank but the killed one; each of them ends within ``WITHIN_S``.

    Args:
        fn: at the top level of its file; called as ``fn(rank, *args)``. One rank calls ``kill_me``.
        world_size: number of processes.
        *args: picklable.
    """
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
        source = (fn.__module__, inspect.getfile(fn), fn.__qualname__)
        arguments = (source, world_size, folder, 10 * WITHIN_S, pickle.dumps((args, {})))
        context = mp.start_processes(_rank_main, arguments, nprocs=world_size, start_method="forkserver", join=False)
        assert context is not None
        killed = next_killed(context.processes)
        end = time.monotonic() + WITHIN_S
        for process in context.processes:
            process.join(max(end - time.monotonic(), 0))
        hanging = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
        for rank in hanging:
            context.processes[rank].kill()
            context.processes[rank].join()
        assert not hanging, f"ranks {hanging} are still running {WITHIN_S:.0f} s after rank {killed} was killed"
        errors = {rank: Path(folder) / f"error-{rank}" for rank in range(world_size) if rank != killed}
        return {rank: path.read_text() if path.exists() else "no error" for rank, path in errors.items()}


def next_killed(processes: list[Any]) -> int:
    """Wait until a process has been killed, and return its rank."""
    end = time.monotonic() + 2 * WITHIN_S
    while time.monotonic() < end:
        for rank, process in enumerate(processes):
            process.join(0.05)
            if process.exitcode == -signal.SIGKILL:
                return rank
    raise AssertionError("no rank was killed")
