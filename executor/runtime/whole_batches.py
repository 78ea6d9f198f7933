"""``whole_batches``: a context in which every rank passes whole batches to a sharded module, and gets whole results.

``model.generate`` runs in it: each call cuts its arguments to the layouts of the plan, and gathers what it returns.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from executor.redistribute import Redistributor
from executor.runtime.run_context import RunContexts
from executor.torch_internals_generation import start_fully_sharded
from planner.errors import PlanMismatchError
from planner.model_rewrites.cache_argument import is_cache


class BatchForm:
    """Whether plain tensors at the root are whole batches, or this rank's shards; one object for each sharded module."""

    def __init__(self) -> None:
        self.is_whole = False
        self.keeps_logits_sharded = False
        """Whether a result with a loss keeps its other tensors as DTensors, which may be too large to be gathered."""


_forms: MutableMapping[nn.Module, BatchForm] = weakref.WeakKeyDictionary()
"""Sharded root -> the form of its batches. Global, because hooks and callers share nothing but the module."""


@contextmanager
def whole_batches(module: nn.Module) -> Iterator[None]:
    """Return a context in which all ranks call ``module`` with the same whole batch, and get whole plain results.

    Args:
        module: the result of ``shard_module``.

    A batch or a sequence that the plan's axes do not divide is not split on them: the results are right, but ranks
    repeat each other's work. Key-value caches stay sharded. Gathering the results is not part of the plan.

    Raises:
        PlanMismatchError: ``module`` has not been sharded by ``shard_module``.
    """
    form = _forms.get(module)
    if form is None:
        raise PlanMismatchError(
            f"{type(module).__name__} is no sharded module.",
            subject="module",
            expected="the result of shard_module",
            found="a plain module",
            what_to_do="Call whole_batches with the module that shard_module returned.",
        )
    before, form.is_whole = form.is_whole, True
    try:
        yield
    finally:
        form.is_whole = before


def attach_whole_results(
    module: nn.Module, form: BatchForm, redistributor: Redistributor, contexts: RunContexts
) -> None:
    """Hook ``module``: while batches are whole, its results are gathered; ``generate`` runs in whole batches.

    Call it after all other hooks on the root's output.

    Args:
        module: the root.
        form: the form of its batches.
        redistributor: gathers results.
        contexts: contexts of a run, for the encoder that ``generate`` calls apart from the root.
    """
    _forms[module] = form
    module.register_forward_hook(_GatherResults(form, redistributor))
    generate = getattr(module, "generate", None)
    if callable(generate):
        encoder = module.get_encoder() if _is_encoder_decoder(module) else None
        if encoder is not None:
            contexts.attach_part(encoder)
        module.generate = _Generate(module, generate)  # type: ignore[assignment]


def _is_encoder_decoder(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False)) and hasattr(
        module, "get_encoder"
    )


class _Generate:
    """transformers' ``generate`` of a sharded module: whole prompts in, whole tokens out, on every rank."""

    def __init__(self, module: nn.Module, generate: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._generate = weakref.WeakMethod(generate) if hasattr(generate, "__self__") else lambda: generate
        functools.update_wrapper(self, generate, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``generate`` with the same arguments on every rank."""
        module, generate = self._module(), self._generate()
        assert module is not None
        assert generate is not None
        # The encoder is called first, apart from the root, which alone knows all FSDP modules.
        start_fully_sharded(module)
        with whole_batches(module):
            return generate(*args, **kwargs)


class _GatherResults:
    """A forward hook on the root that gathers its results while batches are whole; caches stay sharded."""

    def __init__(self, form: BatchForm, redistributor: Redistributor) -> None:
        self._form, self._redistributor = form, redistributor

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._form.is_whole:
            return output
        if self._form.keeps_logits_sharded and any(map(_is_scalar, pytree.tree_leaves(output, is_leaf=is_cache))):
            return pytree.tree_map(lambda leaf: self._gathered(leaf) if _is_scalar(leaf) else leaf, output)
        return pytree.tree_map(self._gathered, output, is_leaf=is_cache)

    def _gathered(self, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        whole = self._redistributor.redistribute(leaf, self._redistributor.replicated)
        local: torch.Tensor = whole.to_local(grad_placements=self._redistributor.replicated)
        if local.dim() == 0:
            return local.clone()  # loops scale losses in place, which autograd forbids for this view
        zigzag = self._redistributor.zigzag
        if zigzag is not None and local.dim() > 1 and local.shape[1] == zigzag.length:
            return zigzag.to_natural(local, 1)
        return local


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, DTensor) and leaf.dim() == 0
