"""Internals of torch's optimizers and gradient scaler that the executor mends, to be checked with each new version.

Checked with torch 2.13: the orthogonalization in Muon, and DTensor's handler of the check for infinite gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import _muon

from executor.torch_internals.dtensor import all_reduce, waited


def mend_muon() -> None:
    """Make torch's Muon orthogonalize whole matrices, for DTensors too.

    DTensor multiplies shards and sums products in bf16, in which Muon computes: updates would differ by some percent.
    """
    on_plain_tensors: Callable[..., torch.Tensor] = _muon._zeropower_via_newtonschulz

    @functools.wraps(on_plain_tensors)
    def orthogonalized(gradient: torch.Tensor, *args: Any) -> torch.Tensor:
        if not isinstance(gradient, DTensor):
            return on_plain_tensors(gradient, *args)
        whole = on_plain_tensors(gradient.full_tensor(), *args)
        return distribute_tensor(whole, gradient.device_mesh, gradient.placements, src_data_rank=None)

    _muon._zeropower_via_newtonschulz = cast(Any, orthogonalized)


def mend_grad_scaler() -> None:
    """Make ``GradScaler`` see an infinite gradient on all ranks, whichever rank and gradient it is in.

    DTensor reduces the result of the check over the axes that shard the first gradient alone, so that ranks may differ
    in whether they skip a step.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    check = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    of_torch = handlers[check]

    def handler(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        of_torch(op_call, args, kwargs)
        gradients, found_inf = args[0], args[1]
        mesh = gradients[0].device_mesh
        for axis in range(mesh.ndim):
            found_inf.copy_(waited(all_reduce(found_inf, "max", mesh.get_group(axis))))

    handlers[check] = handler
