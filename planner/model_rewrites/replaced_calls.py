"""Calls in a forward that a planned run replaces.

Checks of values and the module's own checkpointing do nothing. ``tensor[mask] = value`` runs by `torch.where`, where
the value is the same for all elements that the mask selects: SpecAugment puts a learned vector in place of masked
frames this way, and masked image models a mask token. How many elements a mask selects is a matter of values, for
which DTensor has no rule.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.distributions import Distribution

_WARNING = "warn_if_padding_and_no_attention_mask"
_NOT_REENTRANT = "_checkpoint_without_reentrant_generator"
"""What ``checkpoint(use_reentrant=False)`` runs before and after the function, in torch 2.13."""


@contextmanager
def without_value_checks() -> Iterator[None]:
    """Within this context transformers does not look for padding, and nothing checks the values of its arguments.

    Such checks look at tensors only to warn or to raise an error. A trace has no values. In a sharded run, each look
    would be a collective that no plan has, and a wait for the GPU.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Distribution, "_validate_args", False))
        for check in ("_check_tensor_all", "_check_tensor_all_with"):
            stack.enter_context(mock.patch.object(torch, check))
        modeling = sys.modules.get("transformers.modeling_utils")
        if modeling is not None:
            stack.enter_context(mock.patch.object(modeling.PreTrainedModel, _WARNING))
        yield


class PlannedCheckpoint:
    """The ``context_fn`` of a checkpoint that a plan asks for."""

    def __init__(self, contexts: Callable[[], tuple[Any, Any]]) -> None:
        self._contexts = contexts

    def __call__(self) -> tuple[Any, Any]:
        """Return the contexts of the forward and of each recomputation."""
        return self._contexts()


@contextmanager
def without_own_checkpoints(*, warn: bool = False) -> Iterator[None]:
    """Within this context `torch.utils.checkpoint` checkpoints only what a plan asks for (`PlannedCheckpoint`).

    A plan says which blocks are recomputed, and has the collectives and the memory of these recomputations.

    Args:
        warn: whether another checkpoint is a warning.
    """
    module = torch.utils.checkpoint
    not_reentrant = getattr(module, _NOT_REENTRANT)

    def ignored() -> None:
        if warn:
            warnings.warn(
                "forward calls torch.utils.checkpoint, which does nothing in a planned run: the plan says what is "
                'recomputed. Plan with ac="full" or ac="selective" to choose it.',
                stacklevel=4,
            )

    def generator(
        function: Callable[..., Any], preserve: bool, context_fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        if isinstance(context_fn, PlannedCheckpoint):
            yield from not_reentrant(function, preserve, context_fn, *args, **kwargs)
        else:
            ignored()
            yield

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        ignored()
        return function(*args)

    with (
        mock.patch.object(module, _NOT_REENTRANT, generator),
        mock.patch.object(module.CheckpointFunction, "apply", apply),
    ):
        yield


_WHOLE = slice(None)


def masked_values(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor | None:
    """Return ``tensor`` after ``tensor[index] = value``, as a new tensor; None where that is no such assignment.

    It is one if ``index`` has one boolean mask and else whole dims, and the value has no dim of selected elements.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    masks = [part for part in parts if isinstance(part, torch.Tensor) and part.dtype == torch.bool and part.dim()]
    others = [part for part in parts if not any(part is mask for mask in masks)]
    if len(masks) != 1 or not all(isinstance(part, slice) and part == _WHOLE for part in others):
        return None
    (mask,) = masks
    before = next(position for position, part in enumerate(parts) if part is mask)
    after = tensor.dim() - before - mask.dim()
    if isinstance(value, torch.Tensor):
        if value.dim() > after:
            return None
    elif not isinstance(value, (int, float)):
        return None
    shape = (1,) * before + tuple(mask.shape) + (1,) * after
    new = value.to(tensor.dtype) if isinstance(value, torch.Tensor) else value
    return torch.where(mask.reshape(shape), new, tensor)


def scattered_values(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor | None:
    """Return ``tensor`` after ``tensor[index] = value``, as a new tensor; None where that is no such assignment.

    It is one if ``value`` is a tensor that needs a gradient, and ``index`` takes a slice or one element of one dim, as
    in ``out[..., 0::2] = x``.
    """
    if not (isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()):
        return None
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is Ellipsis or type(part) in (int, slice) for part in parts):
        return None
    taken = [(position, part) for position, part in enumerate(parts) if part is not Ellipsis and part != _WHOLE]
    if len(taken) != 1:
        return None
    ((position, part),) = taken
    dim = position - len(parts) if Ellipsis in parts[:position] else position
    shape = [*tensor.shape]
    if isinstance(part, int):
        del shape[dim]
    else:
        shape[dim] = len(range(*part.indices(tensor.shape[dim])))
    if value.dim() > len(shape):
        return None
    new = value.to(tensor.dtype).expand(shape)
    if isinstance(part, int):
        return torch.select_scatter(tensor, new, dim, part)
    return torch.slice_scatter(tensor, new, dim, *part.indices(tensor.shape[dim]))


def assigned_values(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor | None:
    """Return ``tensor`` after ``tensor[index] = value``, as a new tensor; None where the assignment runs in place."""
    masked = masked_values(tensor, index, value)
    return scattered_values(tensor, index, value) if masked is None else masked


@contextmanager
def without_autocast_off() -> Iterator[None]:
    """Within this context, ``torch.autocast(..., enabled=False)`` does nothing, as it does where autocast is not on."""
    enter: Any = torch.autocast.__enter__
    leave: Any = torch.autocast.__exit__

    def entered(self: Any) -> Any:
        return enter(self) if self._enabled else self

    def left(self: Any, *error: Any) -> Any:
        return leave(self, *error) if self._enabled else None

    with (
        mock.patch.object(torch.autocast, "__enter__", entered),
        mock.patch.object(torch.autocast, "__exit__", left),
    ):
        yield


@contextmanager
def assignments_as_ops() -> Iterator[None]:
    """Within this context, assignments by a mask, or of what needs gradients, are ops that have rules and backwards."""
    assign = torch.Tensor.__setitem__

    @functools.wraps(assign)
    def as_ops(tensor: torch.Tensor, index: Any, value: Any) -> None:
        new = assigned_values(tensor, index, value)
        if new is None:
            assign(tensor, index, value)
        else:
            tensor.copy_(new)

    with mock.patch.object(torch.Tensor, "__setitem__", as_ops):
        yield


@contextmanager
def calls_as_ops() -> Iterator[None]:
    """Within this context, assignments are ops (`assignments_as_ops`), and autocast that is off leaves no trace."""
    with assignments_as_ops(), without_autocast_off():
        yield
