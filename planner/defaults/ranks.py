"""`current_ranks`, `is_first_rank`: the ranks of the program of this process, and how many of them are on a node."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks of a program.

    Attributes:
        total: number of ranks.
        per_node: number of ranks on each node.
    """

    total: int
    per_node: int

    def __post_init__(self) -> None:
        if self.total % self.per_node:
            raise JobError(
                f"{self.total} ranks do not divide into nodes of {self.per_node}.",
                what_to_do="Start equally many ranks on each node, or give the cluster.",
                field="cluster",
            )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.total // self.per_node

    def __str__(self) -> str:
        where = "" if self.nodes == 1 else f" on {self.nodes} nodes"
        return f"{self.total} rank{'s' if self.total > 1 else ''}{where}"


def current_ranks() -> Ranks | None:
    """Return the ranks of this process's program, without communication; None: it is a process of its own.

    They are those of the default process group, or those that torchrun states in the environment. Where nobody says how
    many ranks a node has, it has one for each GPU; without a GPU all ranks count as ranks of one node.

    Raises:
        JobError: the nodes have different numbers of ranks.
    """
    if dist.is_available() and dist.is_initialized():
        total = dist.get_world_size()
    elif "WORLD_SIZE" in os.environ:
        total = int(os.environ["WORLD_SIZE"])
    else:
        return None
    stated = os.environ.get("LOCAL_WORLD_SIZE")
    if stated is not None and int(stated) <= total:
        return Ranks(total=total, per_node=int(stated))
    gpus = torch.cuda.device_count()
    return Ranks(total=total, per_node=min(gpus, total) if gpus else total)


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of its program, or a process of its own."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
