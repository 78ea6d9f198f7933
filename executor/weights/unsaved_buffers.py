"""Values of tensors on meta that no checkpoint holds (rotary tables, masks), made as the module makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from executor.weights.pretrained import is_pretrained, parameters_on_meta, skeleton_of
from planner.errors import WeightsError

Buffers = Mapping[str, torch.Tensor] | Callable[[], nn.Module]
"""Values by name, or a function that builds the module unsharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsavedTensor:
    """A tensor on meta that no checkpoint holds: a buffer, or a plain attribute."""

    owner: nn.Module
    attribute: str
    name: str
    tensor: torch.Tensor

    def assign(self, values: torch.Tensor, device: torch.device) -> None:
        """Put ``values`` in the place of the tensor, in its dtype."""
        values = values.detach().to(device=device, dtype=self.tensor.dtype)
        if self.attribute in self.owner._buffers:
            self.owner._buffers[self.attribute] = values
        else:
            self.owner.__dict__[self.attribute] = values


def unsaved_tensors(module: nn.Module) -> list[UnsavedTensor]:
    """Return the tensors of ``module`` on meta that no checkpoint holds."""
    unsaved = []
    for prefix, part in module.named_modules():
        buffers = {name: part._buffers[name] for name in part._non_persistent_buffers_set if name in part._buffers}
        attributes = {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
        for name, tensor in {**buffers, **attributes}.items():
            if tensor is not None and tensor.is_meta:
                full_name = f"{prefix}.{name}".removeprefix(".")
                unsaved.append(UnsavedTensor(owner=part, attribute=name, name=full_name, tensor=tensor))
    return unsaved


def values_of_unsaved(
    module: nn.Module, buffers: Buffers | None, skeleton: nn.Module | None
) -> list[tuple[UnsavedTensor, torch.Tensor]]:
    """Return each unsaved tensor of ``module`` with its values, on the CPU.

    Values come from ``buffers``. Those of transformers' models are made by building the model anew from its config,
    with parameters on meta.

    Args:
        module: the root module.
        buffers: values by name, or a function that builds the unsharded module; None: nothing is given.
        skeleton: the skeleton of ``module``, if it is a model of transformers.

    Raises:
        WeightsError: tensors whose values nothing gives, or values of another shape; names all of them.
    """
    unsaved = unsaved_tensors(module)
    if not unsaved:
        return []
    given = _given(buffers)
    for prefix, part in module.named_modules():
        inside = [item for item in unsaved if item.name not in given and _is_inside(item.name, prefix)]
        if inside and is_pretrained(part):
            made = named_tensors(skeleton if skeleton is not None and part is module else skeleton_of(part))
            given = {**{f"{prefix}.{name}".removeprefix("."): value for name, value in made.items()}, **given}
    wrong = [item for item in unsaved if item.name not in given or given[item.name].shape != item.tensor.shape]
    if wrong:
        names = ", ".join(f"{item.name!r} {tuple(item.tensor.shape)}" for item in wrong)
        raise WeightsError(
            f"These tensors are on meta and in no checkpoint, and how the module makes them is not known: {names}. "
            "Nothing has been loaded.",
            what_to_do="Pass buffers=: their values by name, or a function without arguments that builds the unsharded "
            "module (its parameters take no memory); or build the module with these buffers off meta.",
            missing=[item.name for item in wrong],
        )
    return [(item, given[item.name]) for item in unsaved]


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> buffer or plain tensor attribute of ``module``, of those that have values."""
    tensors: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules():
        own = {
            **part._buffers,
            **{name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)},
        }
        for name, tensor in own.items():
            if tensor is not None and not tensor.is_meta:
                tensors[f"{prefix}.{name}".removeprefix(".")] = tensor
    return tensors


def _given(buffers: Buffers | None) -> dict[str, torch.Tensor]:
    if buffers is None:
        return {}
    if isinstance(buffers, Mapping):
        return dict(buffers)
    with parameters_on_meta():
        return named_tensors(buffers())


def _is_inside(name: str, prefix: str) -> bool:
    return not prefix or name.startswith(f"{prefix}.")
