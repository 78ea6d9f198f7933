"""`join_program`: this process as a rank of its program, whether or not there is a process group yet."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from executor.torch_internals.store import HashStore, PrefixStore, Store, default_store

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets, and from which torch initialises a process group."""

_JOIN_TIMEOUT = timedelta(minutes=30)
"""Time that ranks have to start: torch's own limit for gloo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A rank and its program.

    Attributes:
        rank: the global rank of this process.
        ranks: the global ranks that work together, the first of which plans.
        store: key-value store that all of them share.
    """

    rank: int
    ranks: tuple[int, ...]
    store: Store

    @property
    def is_first(self) -> bool:
        """Whether this rank plans for the others."""
        return self.rank == self.ranks[0]


def join_program(ranks: Sequence[int] | None = None) -> Program:
    """Return this process as a rank: of the default process group, of torchrun's program, or of a program of its own.

    Args:
        ranks: global ranks of the default process group that work together; None: all of them.
    """
    if dist.is_initialized():
        rank, world_size, store = dist.get_rank(), dist.get_world_size(), default_store() or HashStore()
    elif all(name in os.environ for name in _VARIABLES):
        store, rank, world_size = next(rendezvous("env://", timeout=_JOIN_TIMEOUT))
    else:
        rank, world_size, store = 0, 1, HashStore()
    chosen = tuple(range(world_size)) if ranks is None else tuple(ranks)
    return Program(rank=rank, ranks=chosen, store=store)


def start_group(program: Program, device_type: str) -> str | None:
    """Initialise the default process group; return its backend, or None where it is initialised already.

    On GPUs the current device becomes the one of this rank's ``LOCAL_RANK``. The group ends with the process.
    """
    if dist.is_initialized():
        return None
    backend = "nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store = PrefixStore("default_pg", program.store)
    dist.init_process_group(backend, store=store, rank=program.rank, world_size=len(program.ranks))
    atexit.register(_end_group)
    return backend


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
