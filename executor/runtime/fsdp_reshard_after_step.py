"""FSDP modules in a training loop: what they gather and reduce in each backward pass, and which parameters they show.

A module that reshards after the step has its all-gather in the step's first forward, and its reduce-scatter in the last
backward. In between, its gradients accumulate unreduced, in the dtype of the reduction. torch's ``fully_shard``
supports this, but has to be told at the start of every backward whether that backward is the last one of the step.

While torch keeps a module's parameters gathered it also registers them in the module, in place of the sharded ones. A
loop that then asked the model for its parameters (``model.zero_grad()`` between forward and backward, clipping between
two backward passes) would get others than its optimizer has. So the sharded ones are registered whenever neither a
forward nor a backward runs, and the gathered memory is kept.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from executor.runtime.grad_reduction import GradientReduction
from executor.torch_internals import fsdp as fsdp_internals


class ReshardAfterStep:
    """Tells FSDP modules which backward of a step is the last, and reshards those whose parameters have changed."""

    def __init__(self, root: nn.Module, reduction: GradientReduction) -> None:
        """Take the root of the model, and the reduction, which counts the backward passes of a step."""
        self._root = root
        self._reduction = reduction
        self._modules: list[FSDPModule] = []
        self._after_step: dict[FSDPModule, tuple[int, ...]] = {}

    def add(self, module: FSDPModule, *, after_step: bool) -> None:
        """Take an FSDP module; keep its parameters gathered for the whole step if ``after_step``."""
        self._modules.append(module)
        if after_step:
            self._after_step[module] = ()

    def begin_pass(self, is_last: bool) -> None:
        """Prepare for a backward pass."""
        self._set_last(is_last)
        self._register(gathered=True)

    def end_pass(self) -> None:
        """Show the sharded parameters."""
        self._register(gathered=False)

    @property
    def is_in_pass(self) -> bool:
        """Whether ``fully_shard`` has more to do in the running backward pass."""
        return fsdp_internals.backward_is_unfinished(cast(FSDPModule, self._root))

    def before_forward(self) -> None:
        """Reshard modules whose parameters have changed, and show the parameters that are gathered still."""
        self._reduction.drop_cleared()
        for module, versions in self._after_step.items():
            current = fsdp_internals.parameter_versions(module)
            if current != versions:
                module.reshard()
                self._after_step[module] = current
        self._register(gathered=True)

    def after_forward(self) -> None:
        """Reshard the modules after a forward without a backward, unless the forward ran in the middle of a step."""
        if not torch.is_grad_enabled() and not self._reduction.is_amid_step:
            for module in self._after_step:
                module.reshard()
        self._register(gathered=False)

    def abandon_step(self) -> None:
        """Restart the step after an interrupted backward, and drop the gradients that it left."""
        self._reduction.restart()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters of all FSDP modules."""
        return [parameter for module in self._modules for parameter in fsdp_internals.sharded_parameters(module)]

    def unreduced(self) -> dict[nn.Parameter, torch.dtype]:
        """Return sharded parameter -> dtype of its gradient, for gradients that have accumulated unreduced."""
        return {
            parameter: dtype
            for module in self._after_step
            for parameter, dtype in fsdp_internals.unreduced_parameters(module).items()
        }

    def reduce(self) -> None:
        """Reduce-scatter the gradients that are unreduced, outside of a backward pass, and reshard their modules."""
        self._set_last(True)
        fsdp_internals.reduce_accumulated(cast(FSDPModule, self._root))

    def forget(self, parameter: nn.Parameter | None = None) -> None:
        """Drop the unreduced gradient of ``parameter``, if it has one; None: of all parameters."""
        for module in self._after_step:
            fsdp_internals.forget_gradients(module, parameter)

    def _set_last(self, is_last: bool) -> None:
        for module in self._after_step:
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_reshard_after_backward(is_last, recurse=False)

    def _register(self, *, gathered: bool) -> None:
        for module in self._modules:
            fsdp_internals.register_parameters(module, gathered=gathered)
