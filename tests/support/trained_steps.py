"""A sharded and the unsharded module, trained side by side for some steps of AdamW, on the ranks of `run_on_gloo`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner.model_rewrites.tree_paths import tensors_in
from planner.plan.sharding_plan import ShardingPlan

STEPS = 3


class Errors(NamedTuple):
    """The largest absolute errors of a loss in any step, and of a parameter and a buffer after any step."""

    loss: float
    parameter: float
    buffer: float


def errors_in_steps(plan: ShardingPlan, make: Callable[[], tuple[nn.Module, Any]], lr: float = 1e-2) -> Errors:
    """Return the errors of a module under ``plan`` against the unsharded one.

    Args:
        make: returns the module and its arguments (a tuple or a dict), equal ones each time.
        lr: learning rate of AdamW.
    """
    (reference, inputs), (model, _) = make(), make()
    mesh = device_mesh_for(plan, device_type="cpu")
    shard_module(model, mesh, plan)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=lr, eps=1e-4) for each in (reference, model)]
    worst = Errors(0.0, 0.0, 0.0)
    for _ in range(STEPS):
        loss, expected = _loss(_called(model, local_batch(inputs, mesh, plan))), _loss(_called(reference, inputs))
        for optimizer, value in zip(optimizers, (expected, loss), strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        found = Errors(
            _difference([expected], [loss]),
            _difference(reference.parameters(), model.parameters()),
            _difference(reference.buffers(), model.buffers()),
        )
        worst = Errors(*map(max, worst, found))
    return worst


def _called(module: nn.Module, inputs: Any) -> Any:
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def _loss(output: Any) -> Tensor:
    """Return the loss, or what a caller may compute: from all numbers, or else from the first tensor."""
    if isinstance(getattr(output, "loss", None), Tensor):
        return output.loss
    results = tensors_in(output)
    numbers = [result for result in results if result.dim() == 0]
    return sum(numbers[1:], numbers[0]) if numbers else results[0].square().mean()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _difference(ones: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    pairs = zip(map(_numbers, ones), map(_numbers, others), strict=True)
    return max(((other - one).abs().max().item() for one, other in pairs), default=0.0)


def _numbers(tensor: Tensor) -> Tensor:
    """Return the whole of ``tensor``, as numbers that can be subtracted: a buffer may be a mask."""
    whole = _whole(tensor.detach())
    return whole.to(torch.promote_types(whole.dtype, torch.float32))
