"""`encoders_of_sizes`: the modules that read the sizes of images, and so take a batch apart."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from planner.model_rewrites.assumed_values import AssumedValues
from planner.model_rewrites.image_sizes.packed_attention import packed_attention
from planner.model_rewrites.image_sizes.tables import size_tables
from planner.model_rewrites.random_branches import likelier_branches
from planner.model_rewrites.replaced_calls.checkpoints import without_own_checkpoints
from planner.model_rewrites.tree_paths import tensors_in


def encoders_of_sizes(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Return the FQNs of the modules whose tensors are a table of sizes and packed rows, each the outermost one.

    Args:
        module: on the meta device; its forward runs once.
        args, kwargs: arguments of one call, with known values. Without a table among them, no module is one.
    """
    if not size_tables(tensors_in((args, kwargs))):
        return []
    search = _Search()
    with ExitStack() as stack:
        for name, part in module.named_modules():
            part.__dict__["forward"] = _Forward(name, part, search)
            stack.callback(part.__dict__.pop, "forward", None)
        values = stack.enter_context(AssumedValues())
        values.know((args, kwargs))
        stack.enter_context(without_own_checkpoints())
        stack.enter_context(likelier_branches())
        stack.enter_context(torch.no_grad())
        # Whatever it raises without values: the trace says what is wrong with it.
        with suppress(Exception):
            module(*args, **kwargs)
    return list(search.found)


class _Search:
    """What has been found, and whether a module that was found is running."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self.is_inside = False


class _Forward:
    """The forward of a module, which reports the module if it reads sizes, outside of one that does."""

    def __init__(self, name: str, module: nn.Module, search: _Search) -> None:
        self._name, self._module, self._search, self._forward = name, module, search, module.forward
        functools.update_wrapper(self, module.forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._search.is_inside or not _is_encoder(tensors_in((args, kwargs))):
            return self._forward(*args, **kwargs)
        self._search.found[self._name] = None
        self._search.is_inside = True
        try:
            with packed_attention(self._module):
                return self._forward(*args, **kwargs)
        finally:
            self._search.is_inside = False


def _is_encoder(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether ``tensors`` are a table of sizes, the rows it counts, and nothing that has samples."""
    tables = size_tables(tensors)
    known = {id(tensor) for table in tables for tensor in (table.tensor, table.packed)}
    return bool(tables) and all(id(tensor) in known or not tensor.dim() for tensor in tensors)
