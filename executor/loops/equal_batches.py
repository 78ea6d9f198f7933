"""A check that all ranks pass the same whole batch, which a sampler per rank would not do."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from executor.runtime.root.sharded_root import ShardedRoot
from planner.errors import PlanMismatchError

_CHECKED_CALLS = 2
"""Calls that are checked in training, and as many in evaluation; a check copies the batch to the CPU."""


def check_equal_batches(module: nn.Module, root: ShardedRoot) -> None:
    """Make the first calls of ``module`` raise an error on every rank if ranks pass different whole batches.

    Args:
        module: the sharded module.
        root: its record; the ranks of its mesh are all ranks of the default process group.
    """
    module.register_forward_pre_hook(_EqualBatches(root), prepend=True, with_kwargs=True)


class _EqualBatches:
    """A forward pre-hook that compares checksums of the tensors of a call: one small all-gather."""

    def __init__(self, root: ShardedRoot) -> None:
        self._root = root
        self._remaining = {True: _CHECKED_CALLS, False: _CHECKED_CALLS}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._root.form.is_whole or self._remaining[module.training] == 0:
            return
        self._remaining[module.training] -= 1
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
        checksum = torch.tensor([_checksum(plain)], device=_device_of(self._root))
        checksums = [torch.empty_like(checksum) for _ in range(dist.get_world_size())]
        dist.all_gather(checksums, checksum)
        differing = [rank for rank, other in enumerate(checksums) if other != checksums[0]]
        if differing:
            raise PlanMismatchError(
                f"Ranks {', '.join(map(str, differing))} pass another batch than rank 0, but batches are whole here.",
                subject="batch",
                expected="the same whole batch on every rank",
                found=f"{len({int(other) for other in checksums})} different batches",
                what_to_do="Give every rank the same loader of global batches: no DistributedSampler, one seed.",
            )


def _checksum(tensors: list[torch.Tensor]) -> int:
    """Return a CRC-32 of the values and shapes of ``tensors``."""
    checksum = 0
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        checksum = zlib.crc32(values.tobytes(), zlib.crc32(str(tuple(tensor.shape)).encode(), checksum))
    return checksum


def _device_of(root: ShardedRoot) -> torch.device:
    kind = root.device_mesh.device_type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())
