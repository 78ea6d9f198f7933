"""Parameters of a module that its forward sees as other tensors, such as their local ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

Slot = tuple[nn.Module, str, DTensor]
"""A module, an attribute, and the parameter that it holds."""


def sharded_slots(parts: Iterable[nn.Module]) -> list[Slot]:
    """Return the slots of all parameters of ``parts`` that are DTensors; a tied one has several."""
    return [
        (part, name, cast(DTensor, parameter))
        for part in parts
        for name, parameter in part._parameters.items()
        if isinstance(parameter, DTensor)
    ]


@contextmanager
def showing(slots: Sequence[Slot], shown: Mapping[DTensor, torch.Tensor]) -> Iterator[None]:
    """Return a context in which modules have the tensors ``shown`` in place of their parameters."""
    # Not by register_parameter, which accepts only leaves.
    for part, name, parameter in slots:
        part._parameters[name] = cast(nn.Parameter, shown[parameter])
    try:
        yield
    finally:
        for part, name, parameter in slots:
            part._parameters[name] = cast(nn.Parameter, parameter)
