"""The tree of a module: a copy without values, to check changes on, and its restoration where a change fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def meta_tree(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` with its parameters and buffers on meta; ties and all other attributes are shared."""
    tensors: dict[torch.Tensor, torch.Tensor] = {}
    modules: dict[nn.Module, nn.Module] = {}

    def without_values(tensor: Any) -> Any:
        if tensor is None:
            return None
        if tensor not in tensors:
            data = tensor.detach().to("meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors[tensor] = nn.Parameter(data, requires_grad=tensor.requires_grad) if is_parameter else data
        return tensors[tensor]

    def copied(part: Any) -> Any:
        if part is None:
            return None
        if part not in modules:
            copy = modules[part] = part.__class__.__new__(part.__class__)
            copy.__dict__.update(_attributes(part))
            for field in (copy._parameters, copy._buffers):
                field.update({name: without_values(tensor) for name, tensor in field.items()})
            copy._modules.update({name: copied(child) for name, child in copy._modules.items()})
        return modules[part]

    tree: nn.Module = copied(module)
    return tree


@contextmanager
def restored_on_error(module: nn.Module) -> Iterator[None]:
    """Return a context that undoes what was done to the tree of ``module`` if it ends in an error.

    Restored are each module's class, attributes, submodules, parameters, buffers and hooks. Not restored are the values
    of tensors, and what lies outside the modules.
    """
    before = [(part, part.__class__, dict(vars(part)), _attributes(part)) for part in module.modules()]
    try:
        yield
    except BaseException:
        for part, kind, own, copies in before:
            if part.__class__ is not kind:
                part.__class__ = kind
            for name, container in own.items():
                # The same containers as before: handles of hooks refer to them.
                if container is not copies[name]:
                    container.clear()
                    container.update(copies[name])
            part.__dict__.clear()
            part.__dict__.update(own)
        raise


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of ``module``, with copies of the containers that have its parts, tensors and hooks."""
    own = vars(module).items()
    return {name: value.copy() if name.startswith("_") and _is_container(value) else value for name, value in own}


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, set))
