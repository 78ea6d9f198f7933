"""Modules that return plain local tensors, as in HyperParallel's ``return_local_tensor``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from executor.resolve.fqns import module_fqns
from planner.plan.patterns import resolve_keys
from planner.plan.sharding_plan import ShardingPlan


def apply_local_outputs(module: nn.Module, plan: ShardingPlan, *, opaque: Collection[nn.Module] = ()) -> None:
    """Hook every module in ``return_local_tensor``: the DTensors that it returns become plain pieces, one per rank.

    Call it after all other hooks on outputs, so that it sees what they leave. Unlike torch's, a piece keeps all its
    dims, also those of size 1: otherwise its shape would depend on the number of ranks. The piece of a partial tensor
    is this rank's addend; give the module an ``output_plan`` to have it summed first.
    """
    names = dict.fromkeys(plan.return_local_tensor, True)
    chosen = resolve_keys(names, module_fqns(module, opaque=opaque), field="return_local_tensor", what="module")
    for submodule in {module.get_submodule(fqn): None for fqn in chosen}:
        submodule.register_forward_hook(_local_output_hook)


def _local_output_hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return pytree.tree_map_only(DTensor, lambda tensor: tensor.to_local(), output)
