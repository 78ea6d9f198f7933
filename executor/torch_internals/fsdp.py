"""Internals of torch's ``fully_shard`` that the executor uses, to be checked with each new version of torch.

Checked with torch 2.13: the parameters of an FSDP module and their state between passes, its unreduced gradients, its
collectives on meta, and its record of forwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from executor.torch_internals.dtensor import current_backward_pass, local_of


def _fsdp_params(module: FSDPModule) -> list[Any]:
    """Return torch's records of the parameters of ``module`` itself, without those of FSDP modules inside it."""
    groups = module._get_fsdp_state()._fsdp_param_groups
    return [fsdp_param for group in groups for fsdp_param in group.fsdp_params]


def sharded_parameters(module: FSDPModule) -> list[nn.Parameter]:
    """Return the sharded parameters of ``module`` itself."""
    return [fsdp_param.sharded_param for fsdp_param in _fsdp_params(module)]


def unreduced_parameters(module: FSDPModule) -> dict[nn.Parameter, torch.dtype]:
    """Return sharded parameter -> dtype of its gradient, for gradients that have accumulated unreduced."""
    unreduced: dict[nn.Parameter, torch.dtype] = {}
    for fsdp_param in _fsdp_params(module):
        gradients = [fsdp_param.unsharded_accumulated_grad]
        if hasattr(fsdp_param, "_unsharded_param"):
            gradients.append(fsdp_param._unsharded_param.grad)
        dtypes = [gradient.dtype for gradient in gradients if gradient is not None]
        if dtypes:
            unreduced[fsdp_param.sharded_param] = dtypes[0]
    return unreduced


def register_parameters(module: FSDPModule, *, gathered: bool) -> None:
    """Register the gathered parameters of ``module``, or its sharded ones, if it is gathered now; nothing is freed."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        if not group.is_unsharded:
            continue
        for fsdp_param in group.fsdp_params:
            parameter = fsdp_param.unsharded_param if gathered else fsdp_param.sharded_param
            if gathered and parameter.requires_grad != fsdp_param.sharded_param.requires_grad:
                parameter.requires_grad_(fsdp_param.sharded_param.requires_grad)
            fsdp_param._setattr_on_modules(parameter)


def reduce_accumulated(root: FSDPModule) -> None:
    """Reduce the gradients that have accumulated in the FSDP modules under ``root``, outside of a backward pass."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def adopt_parameters(module: FSDPModule) -> None:
    """Make ``module`` all-gather the parameters registered now, in place of those that ``fully_shard`` registered."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for fsdp_param in group.fsdp_params:
            info = fsdp_param._module_info
            fsdp_param.sharded_param = getattr(info.module, info.param_name)
            # Where a group has several axes, torch's own mesh has one flattened axis in their place.
            fsdp_param._sharding_spec = cast(DTensor, fsdp_param.sharded_param)._spec
            fsdp_param.reset_sharded_param()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveContexts:
    """Contexts in which the collectives of an FSDP module run."""

    all_gather: Callable[[], AbstractContextManager[None]] = nullcontext
    reduce_scatter: Callable[[], AbstractContextManager[None]] = nullcontext


def gather_on_meta(module: FSDPModule, contexts: CollectiveContexts) -> None:
    """Make ``module`` run with its parameters and the buffers of its collectives on meta. torch does not support this.

    Args:
        contexts: contexts in which the collectives of ``module`` run.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    meta = torch.device("meta")

    class OnMeta:
        def allocate(
            self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
        ) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=meta)

    class AllGather(OnMeta, DefaultAllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
            with contexts.all_gather():
                return super().__call__(*args, **kwargs)

    class ReduceScatter(OnMeta, DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> dist.Work:
            with contexts.reduce_scatter():
                return super().__call__(*args, **kwargs)

    module.set_custom_all_gather(AllGather())
    module.set_custom_reduce_scatter(ReduceScatter())
    for group in module._get_fsdp_state()._fsdp_param_groups:
        # The group keeps its device, which selects streams and events: meta has none. A parameter's selects buffers.
        group._validate_no_meta_params = lambda: None  # type: ignore[method-assign]
        for fsdp_param in group.fsdp_params:
            fsdp_param.device = meta


def parameter_versions(module: FSDPModule) -> tuple[int, ...]:
    """Return the number of in-place changes of each parameter of ``module``, including changes of its local tensor."""
    groups = module._get_fsdp_state()._fsdp_param_groups
    sharded: list[Any] = [fsdp_param.sharded_param for group in groups for fsdp_param in group.fsdp_params]
    return tuple(parameter._version + local_of(parameter)._version for parameter in sharded)


def forget_gradients(module: FSDPModule, parameter: nn.Parameter | None = None) -> None:
    """Drop the unreduced gradient of one sharded parameter of ``module``; None: of all."""
    for fsdp_param in _fsdp_params(module):
        if parameter is None or fsdp_param.sharded_param is parameter:
            fsdp_param.unsharded_accumulated_grad = None
            if hasattr(fsdp_param, "_unsharded_param"):
                fsdp_param._unsharded_param.grad = None


def backward_was_interrupted(root: FSDPModule) -> bool:
    """Return whether the last backward of ``root`` ended in an exception."""
    context = root._get_fsdp_state()._state_ctx
    return bool(context.post_backward_final_callback_queued) and current_backward_pass() == -1


def backward_is_unfinished(root: FSDPModule) -> bool:
    """Return whether ``fully_shard`` has more to do at the end of the running backward pass."""
    return bool(root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued)


def was_interrupted(root: FSDPModule) -> bool:
    """Return whether the last forward or backward of ``root`` ended in an exception."""
    context = root._get_fsdp_state()._state_ctx
    unfinished = context.iter_forward_root is not None or context.post_backward_final_callback_queued
    return unfinished and current_backward_pass() == -1


def recorded_forwards(root: FSDPModule) -> int:
    """Return the number of forwards of FSDP modules that ``fully_shard`` has recorded for their backward."""
    # There is no record before the first forward.
    return len(getattr(root._get_fsdp_state()._comm_ctx, "post_forward_order", ()))


def forget_forwards(root: FSDPModule, count: int) -> None:
    """Make ``fully_shard`` forget all but the first ``count`` forwards that it has recorded."""
    order = root._get_fsdp_state()._comm_ctx.post_forward_order
    for group in reversed(order[count:]):
        group._post_forward_indices.pop()
    del order[count:]
