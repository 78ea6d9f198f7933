"""Modules that return plain local tensors, as in HyperParallel's ``return_local_tensor``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from executor.resolve.boundaries import Boundaries
from executor.resolve.fqns import modules_at


def attach_local_outputs(module: nn.Module, boundaries: Boundaries) -> None:
    """Hook the modules in ``return_local_tensor``: each DTensor that they return becomes its local tensor.

    Call this after all other hooks on outputs, so that this hook gets their results. A local tensor keeps dims of size
    1, unlike in ``torch.distributed._shard``, so that its number of dims does not depend on the number of ranks. The
    local tensor of a partial DTensor is this rank's addend; give the module an ``output_plan`` to sum it first.
    """
    for submodule, _, _ in modules_at(module, dict.fromkeys(boundaries.local_outputs)):
        submodule.register_forward_hook(_local_output_hook)


def _local_output_hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return pytree.tree_map_only(DTensor, lambda tensor: tensor.to_local(), output)
