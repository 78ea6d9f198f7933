"""`local_micro_batches`: what a rank feeds to a sharded module in one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from executor.resolve.batch import local_batch
from executor.resolve.sharded_as import mesh_of, plan_of
from planner.errors import PlanLayoutError


def local_micro_batches(module: nn.Module, batch: Any) -> list[Any]:
    """Return this rank's slices of the micro-batches of a global batch, on the mesh's device.

    The result has one item for each of ``plan_of(module).micro_batches``: the arguments of one call of ``module``.
    Scale each loss by one over their number, and step the optimizer after the last backward.

    Args:
        module: the sharded module.
        batch: a tuple of positional or a mapping of keyword arguments, or one tensor; all ranks pass the same values.
            Tensors whose first dim is that of the first tensor hold samples, and are split; others are passed whole.

    Raises:
        PlanMismatchError: the module is not sharded. `UnmatchedKeyError`: the plan does not name a tensor of the batch.
        PlanLayoutError: the samples do not divide into micro-batches, or a tensor does not divide over the mesh.
    """
    plan, mesh = plan_of(module), mesh_of(module)
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    elif isinstance(batch, Mapping):
        batch = dict(batch)  # transformers' BatchEncoding is no dict, in which torch would find no tensors
    count, samples = plan.micro_batches, _samples(batch)
    if samples % count:
        raise PlanLayoutError(
            f"A batch of {samples} samples does not divide into the plan's {count} micro-batches.",
            field="micro_batches",
            key="",
            what_to_do=f"Feed a multiple of {count} samples, or plan with another number of micro-batches.",
        )
    size = samples // count

    def part(index: int) -> Any:
        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            is_samples = leaf.ndim > 0 and leaf.shape[0] == samples
            return (leaf.narrow(0, index * size, size) if is_samples else leaf).to(mesh.device_type)

        return local_batch(pytree.tree_map(cut, batch), mesh, plan)

    return [part(index) for index in range(count)]


def _samples(batch: Any) -> int:
    """Return the first dim of the first tensor of ``batch`` that has one; 1: no tensor has one."""
    tensors = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return next((tensor.shape[0] for tensor in tensors), 1)
