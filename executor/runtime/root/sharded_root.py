"""``ShardedRoot``: what ``shard_module`` knows of a sharded module, for code that is given only the module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from executor.redistribute import Redistributor
from executor.resolve.per_module import PerModule
from executor.resolve.sharded_as import not_sharded
from executor.runtime.grad_reduction import GradientReduction
from executor.runtime.run_context import RunContexts
from executor.runtime.whole_batches import BatchForm
from planner.errors import PlanMismatchError, RunError
from planner.model_rewrites.cache_argument import without_cache
from planner.model_rewrites.selected_rows.selection import selection_of
from planner.model_rewrites.tree_paths import tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRoot:
    """What runs a sharded module; its plan and its mesh are in `executor.resolve.sharded_as`.

    Attributes:
        form: whether its batches are whole.
        redistributor: redistributes tensors on the mesh.
        reduction: reduces the gradients of its parameters.
    """

    form: BatchForm
    redistributor: Redistributor
    reduction: GradientReduction


_roots: PerModule[ShardedRoot] = PerModule("root")
"""Sharded module -> its record: ``shard_module`` and the loops share nothing but the module."""


def remember_root(module: nn.Module, root: ShardedRoot, contexts: RunContexts) -> None:
    """Remember that ``module`` is sharded; its ``forward``, called directly, runs the hooks too, and DDP is refused.

    Call it after all other wrappers of the root's forward.
    """
    _roots[module] = root
    module.forward = _DirectForward(module, contexts)
    # DistributedDataParallel reads this attribute first of all.
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = _RefuseDDP(type(module).__name__)


def sharded_root(module: nn.Module) -> ShardedRoot | None:
    """Return the record of ``module`` itself; None: it is not sharded, or only a part of it."""
    return _roots.get(module)


def find_root(module: nn.Module) -> tuple[nn.Module, ShardedRoot] | None:
    """Return the sharded module in ``module``, which may be wrapped (by peft, for instance), and its record."""
    for part in module.modules():
        root = sharded_root(part)
        if root is not None:
            return part, root
    return None


def root_of(module: nn.Module) -> tuple[nn.Module, ShardedRoot]:
    """Return the result of ``find_root``.

    Raises:
        PlanMismatchError: there is no sharded module in ``module``.
    """
    found = find_root(module)
    if found is None:
        raise not_sharded(module)
    return found


class _DirectForward:
    """The root's forward, without a cache in training; called without the module's hooks, as by peft, it runs them."""

    def __init__(self, module: nn.Module, contexts: RunContexts) -> None:
        self._module = module
        self._contexts = contexts
        self._forward: Callable[..., Any] = module.forward
        # Signatures are looked up on forward, by the executor and by transformers.
        functools.update_wrapper(self, self._forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        module = self._module
        if self._contexts.is_running:
            if module.training and torch.is_grad_enabled():
                kwargs = {**without_cache(self._forward, args, kwargs)}
            output = self._forward(*args, **kwargs)
            if any(selection_of(tensor) is not None for tensor in tensors_in(output)):
                raise RunError(
                    "The forward returns elements that a mask selects, as x[mask]: a planned run keeps all of x.",
                    what_to_do="Return x and the mask, and select outside of the model.",
                )
            return output
        return module(*args, **kwargs)


class _RefuseDDP:
    """Stands where ``DistributedDataParallel`` looks for parameters to ignore, and raises an error when it does."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> Iterator[str]:
        raise PlanMismatchError(
            f"DistributedDataParallel is about to wrap a sharded {self._name}, which reduces its gradients itself.",
            subject="module",
            expected="a sharded module that nothing wraps",
            found="DistributedDataParallel",
            what_to_do="Call the module itself. With Trainer call executor.prepare_trainer(trainer) before training, "
            "with accelerate executor.prepare_accelerator(accelerator, model) before accelerator.prepare.",
        )
