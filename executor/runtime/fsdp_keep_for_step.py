"""Modules that keep what they gathered for a whole step: gathered in its first forward, reduced in its last backward.

Between them gradients add up unreduced, in the dtype that they are reduced in. torch's ``fully_shard`` can do so if it
is told, at the start of every backward, whether that is the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from executor import torch_internals
from executor.runtime.grad_reduction import GradientReduction


class StepGathers:
    """Tells modules which backward of a step is the last, and has them gather again what has changed.

    Where a step is broken off by clearing the gradients, what has added up in these modules is let go of as well;
    that shows by the gradients of all others, so that it takes one parameter at least that is not gathered so.
    """

    def __init__(self, reduction: GradientReduction) -> None:
        """Ask ``reduction`` which backward of a step it is."""
        self._reduction = reduction
        self._modules: dict[FSDPModule, tuple[int, ...]] = {}

    def add(self, module: FSDPModule) -> None:
        """Have ``module`` keep what it gathers."""
        self._modules[module] = ()

    def attach(self, root: nn.Module) -> None:
        """Hook ``root``. Call it after torch has, whose callback at the end of a backward has to come first."""
        root.register_forward_hook(self._watch)

    def _watch(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._modules or not torch.is_grad_enabled():
            return
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._begin)

    def _begin(self, gradient: torch.Tensor) -> None:
        if self._reduction.starts_again():
            self._start_again()
        last = self._reduction.begin()
        for module in self._modules:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)

    def before_forward(self) -> None:
        """Drop what was gathered from parameters that have changed since, and gradients of a step that was given up."""
        if self._modules and self._reduction.starts_again():
            self._start_again()
        for module, versions in self._modules.items():
            found = torch_internals.parameter_versions(module)
            if found != versions:
                module.reshard()
                self._modules[module] = found

    def after_forward_alone(self) -> None:
        """Drop what a forward without a backward has gathered, unless it is amid a step."""
        if not self._reduction.is_amid:
            for module in self._modules:
                module.reshard()

    def give_up(self) -> None:
        """Let go of what a backward that was broken off has left."""
        if self._modules:
            self._start_again()

    def _start_again(self) -> None:
        self._reduction.restart()
        for module in self._modules:
            torch_internals.forget_gradients(module)
