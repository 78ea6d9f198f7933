"""FSDP modules that reshard once a step: all-gather in the step's first forward, reduce-scatter in its last backward.

In between, their gradients accumulate unreduced, in the dtype of the reduction. torch's ``fully_shard`` supports this,
but has to be told at the start of every backward whether that backward is the last one of the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from executor import torch_internals
from executor.runtime.grad_reduction import GradientReduction


class ReshardAfterStep:
    """Tells FSDP modules which backward of a step is the last, and reshards those whose parameters have changed.

    If the user clears the gradients in the middle of a step, the step restarts, and the gradients that have accumulated
    in these modules are dropped. The clearing is detected on gradients of other parameters. So at least one parameter
    must be outside these modules.
    """

    def __init__(self, reduction: GradientReduction) -> None:
        """Take the reduction, which counts the backward passes of a step."""
        self._reduction = reduction
        self._modules: dict[FSDPModule, tuple[int, ...]] = {}

    def add(self, module: FSDPModule) -> None:
        """Keep the parameters of ``module`` gathered for the whole step."""
        self._modules[module] = ()

    def attach(self, root: nn.Module) -> None:
        """Hook ``root``. Call this after ``fully_shard``, whose callback at the end of a backward has to run first."""
        root.register_forward_hook(self._hook_outputs)

    def _hook_outputs(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._modules or not torch.is_grad_enabled():
            return
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        if self._reduction.gradients_were_cleared():
            self._restart()
        is_last = self._reduction.begin()
        for module in self._modules:
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_reshard_after_backward(is_last, recurse=False)

    def before_forward(self) -> None:
        """Reshard modules whose parameters have changed. If the user has cleared gradients, restart the step."""
        if self._modules and self._reduction.gradients_were_cleared():
            self._restart()
        for module, versions in self._modules.items():
            current = torch_internals.parameter_versions(module)
            if current != versions:
                module.reshard()
                self._modules[module] = current

    def after_forward_without_backward(self) -> None:
        """Reshard the modules after a forward without a backward, unless the forward ran in the middle of a step."""
        if not self._reduction.is_amid_step:
            for module in self._modules:
                module.reshard()

    def abandon_step(self) -> None:
        """Restart the step after an interrupted backward, and drop the gradients that it left."""
        if self._modules:
            self._restart()

    def _restart(self) -> None:
        self._reduction.restart()
        for module in self._modules:
            torch_internals.forget_gradients(module)
