"""What is done when an optimizer steps: gradients are reduced, and optimizers that DTensor does not run are refused.

Optimizers are made by the loop and know parameters alone, so the hook is torch's hook on the steps of all optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from executor.resolve.sharded_as import not_sharded
from executor.runtime.grad_reduction import GradientReduction
from executor.runtime.root.sharded_root import sharded_root
from executor.torch_internals.dtensor import current_backward_pass
from executor.torch_internals.optim import mend_grad_scaler, mend_muon
from planner.errors import RunError

_alive: weakref.WeakSet[GradientReduction] = weakref.WeakSet()
"""The gradient reductions of all sharded modules that are alive and have run a forward."""
_ELEMENTWISE = "Use an optimizer that treats each element by itself, such as AdamW, SGD or Adagrad."
_ON_SHARDS = {
    "Adafactor": "it needs means over whole rows and columns",
    "Rprop": "it assigns to masked elements in place",
    "SparseAdam": "gradients of sharded parameters are dense",
}
"""Name of an optimizer that DTensor does not run on shards -> why. Optimizers of other packages have the same names."""
_NOT_ON_DTENSOR = {"bitsandbytes": "its kernels take plain tensors. torchao.optim.AdamW8bit has the same states"}
"""Package of optimizers that no parameter of a sharded module can be given to -> why."""
_FUSED = {"SGD", "Adagrad"}
"""Optimizers whose fused kernels DTensor has no rule for."""
_FOREACH = {"Rprop"}
"""Optimizers whose foreach form DTensor does not run on any layout."""


def watch_optimizers(root: nn.Module, reduction: GradientReduction) -> None:
    """Make optimizers that update parameters of ``root`` find all of its gradients reduced."""
    root.register_forward_pre_hook(_Watched(reduction))


def set_accumulation_steps(module: nn.Module, steps: int) -> None:
    """Set the number of backward passes that the next steps are expected to have, in place of the plan's micro-batches.

    Gradients are right whatever the number is. In the pass that is expected to be the last one, they are reduced while
    the backward runs; if the optimizer steps earlier, they are reduced when it does.

    Args:
        module: a sharded module, or a module that has one inside.
        steps: number of backward passes of a step, for instance the number of batches that an epoch has left.

    Raises:
        ValueError: ``steps`` is not positive.
        PlanMismatchError: no module inside ``module`` is sharded.
    """
    if steps < 1:
        raise ValueError(f"a step has at least one backward pass, not {steps}")
    roots = [root for part in module.modules() if (root := sharded_root(part)) is not None]
    if not roots:
        raise not_sharded(module)
    for root in roots:
        root.reduction.accumulation_steps = steps


class _Watched:
    """A forward pre-hook on a sharded module, or on a copy of one, which has a gradient reduction of its own."""

    def __init__(self, reduction: GradientReduction) -> None:
        self._reduction = reduction

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        _alive.add(self._reduction)


def _before_step(optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return
    ids = set(map(id, parameters))
    own = [reduction for reduction in list(_alive) if not ids.isdisjoint(map(id, reduction.parameters))]
    if not own:
        return
    _check_optimizer(optimizer)
    if current_backward_pass() != -1:
        raise RunError(
            f"{type(optimizer).__name__} steps while a backward pass runs, before gradients are reduced.",
            what_to_do="Call step() after backward(), not from a hook on a parameter's gradient.",
        )
    for reduction in own:
        reduction.complete()


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise RunError if DTensor does not run ``optimizer`` as it is set up."""
    name, package = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
    if package in _NOT_ON_DTENSOR:
        detail = f"{name} of {package} does not run on the parameters of a sharded module: {_NOT_ON_DTENSOR[package]}."
        raise RunError(detail, what_to_do=_ELEMENTWISE)
    for group in optimizer.param_groups:
        is_sharded = any(
            isinstance(parameter, DTensor) and any(not place.is_replicate() for place in parameter.placements)
            for parameter in group["params"]
        )
        if name in _ON_SHARDS and is_sharded:
            raise RunError(f"{name} does not run on sharded parameters: {_ON_SHARDS[name]}.", what_to_do=_ELEMENTWISE)
        for option, names in (("fused", _FUSED), ("foreach", _FOREACH)):
            if group.get(option) and name in names:
                raise RunError(
                    f"{name} with {option}=True does not run on DTensor parameters.",
                    what_to_do=f"Create it with {option}=False.",
                )


register_optimizer_step_pre_hook(_before_step)
mend_muon()
mend_grad_scaler()
