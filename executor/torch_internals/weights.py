"""Internals of torch that loading and saving of weights uses, to be checked with each new version of torch.

Checked with torch 2.13: the split of a dim by a placement, and the exchange of a tensor's implementation, which keeps
the Python object and loses the hooks that autograd runs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from executor.torch_internals.dtensor import like_dtensor, local_of, spec_of
from executor.torch_internals.fsdp import adopt_parameters


def split_by_placement(
    indices: torch.Tensor, placement: Placement, ranks: int
) -> tuple[int, list[torch.Tensor]] | None:
    """Return the dim that ``placement`` shards, and the indices of that dim for each rank; None: it shards nothing.

    Args:
        indices: indices along the dim, before the split.
        placement: a placement on a mesh axis.
        ranks: size of the mesh axis.
    """
    # A strided shard is no Shard in the type hierarchy.
    if isinstance(placement, _StridedShard):
        along = _StridedShard(0, split_factor=placement.split_factor)
        pieces, _ = along._split_tensor(indices, ranks, with_padding=False, contiguous=False)
    elif isinstance(placement, Shard):
        pieces, _ = Shard(0)._split_tensor(indices, ranks, with_padding=False, contiguous=False)
    else:
        return None
    return placement.dim, pieces


def materialize(parameter: nn.Parameter, device: torch.device) -> None:
    """Give ``parameter``, which is on meta, memory on ``device``, without values; it stays the same object.

    A DTensor keeps its mesh and its layout. Hooks on the accumulated gradient stay, and so does ``grad_dtype``.
    """
    hooks = parameter._post_accumulate_grad_hooks
    keeps_any_dtype = parameter.grad_dtype is None
    real: torch.Tensor
    if isinstance(parameter, DTensor):
        real = like_dtensor(torch.empty_like(local_of(parameter), device=device), spec_of(parameter))
    else:
        real = torch.empty_like(parameter, device=device)
    other = nn.Parameter(real, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, other)
    other._post_accumulate_grad_hooks = cast(dict[Any, Any], None)
    if hooks:
        # The hooks are attributes of the object, but autograd finds them by the implementation, which is new.
        parameter._post_accumulate_grad_hooks = hooks
    if keeps_any_dtype:
        parameter.grad_dtype = None


def adopt_all_parameters(module: nn.Module) -> None:
    """Make every FSDP module in ``module`` all-gather the memory that its parameters have now."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            adopt_parameters(cast(FSDPModule, part))


def reshard(module: nn.Module) -> None:
    """Free the gathered parameters of every FSDP module in ``module``, which then has its stored parameters."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
