"""`SelectedRows`: runs the calls that select rows, and those that read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from planner.model_rewrites.selected_rows.count import Count, counted, sizes
from planner.model_rewrites.selected_rows.each_row import RESHAPES, treats_each_row, with_packed_rows
from planner.model_rewrites.selected_rows.losses import (
    CLASS_LOSSES,
    ELEMENT_LOSSES,
    TOTALS,
    ctc_loss,
    loss_of_classes,
    loss_of_elements,
    total_of_rows,
)
from planner.model_rewrites.selected_rows.selection import (
    Selection,
    have_rows,
    mask_of_index,
    may_select,
    mixed_rows,
    select_rows,
    selection_of,
    with_rows,
)

_OF_NO_VALUES = frozenset({"dtype", "device", "requires_grad", "ndim", "is_meta", "dim", "is_floating_point", "layout"})
_OF_SIZES = frozenset({"shape", "size", "numel", "__len__", "nelement"})


class SelectedRows:
    """Runs the calls that select elements by a mask, and those that read what was selected."""

    def __init__(self) -> None:
        self._are_there = False

    def may_run(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Return whether `run` may have a result for a call: a quick look."""
        return self._are_there or may_select(func, args)

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_own: bool = False
    ) -> Any:
        """Return the result of a call; NotImplemented if it selects nothing and reads nothing that was selected.

        Args:
            func: the function that is called with ``args`` and ``kwargs``.
            is_own: whether the call is none of the forward, but one that a planned run makes of what enters a module.

        Raises:
            ModelError: the call reads what was selected in a way that is not supported.
        """
        selected = self.select(func, args, kwargs)
        if selected is not NotImplemented:
            self._are_there = True
            return selected
        if not self._are_there:
            return NotImplemented
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        if any(isinstance(leaf, Count) for leaf in leaves):
            raise counted()
        selections = [selection for leaf in leaves if (selection := selection_of(leaf)) is not None]
        if not selections:
            return NotImplemented
        if is_own:
            result = func(*args, **kwargs)
            return with_rows("", result, selections[0]) if have_rows(result, selections[0]) else result
        self.check(selections)
        return self._run_on_rows(func, args, dict(kwargs), selections[0])

    def select(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the rows that a call selects by a mask, or their places; NotImplemented if it does not."""
        return select_rows(func, args, kwargs)

    def _run_on_rows(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], selection: Selection
    ) -> Any:
        name, mask = name_of(func), selection.rows
        if name in _OF_NO_VALUES:
            return func(*args, **kwargs)
        if name in _OF_SIZES:
            return sizes(name, func, args, kwargs)
        if name == "__setitem__":
            return _put_back(args, mask)
        if func in CLASS_LOSSES:
            return loss_of_classes(func, args, kwargs, selection)
        if func is F.ctc_loss:
            return ctc_loss(args, kwargs)
        if func in ELEMENT_LOSSES:
            return loss_of_elements(func, args, kwargs, selection)
        if func in TOTALS:
            total = total_of_rows(TOTALS[func], args, kwargs, mask)
            if total is not NotImplemented:
                return total
        else:
            args = with_packed_rows(name, args, selection)
            if not treats_each_row(name, args, kwargs):
                raise mixed_rows(name)
        is_places = selection.is_places and (name in RESHAPES or name == "__getitem__")
        return with_rows(name, func(*args, **kwargs), replace(selection, is_places=is_places))

    def check(self, selections: Sequence[Selection]) -> None:
        """Raise a `ModelError` unless these select the same elements as before, and alike, where that can be known."""


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function, or of the attribute that it reads."""
    name = getattr(func, "__name__", "") or getattr(func, "_qualified_op_name", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return str(name).rpartition("::")[2]


def _put_back(args: tuple[Any, ...], mask: torch.Tensor) -> None:
    """Assign rows to the elements that they were selected from: ``tensor[mask] = rows``."""
    tensor, index, value = args
    given = mask_of_index(tensor, index)
    fits = given is not None and given.numel() == mask.numel() and tensor.dim() == value.dim() + given.dim() - 1
    if given is None or selection_of(value) is None or not fits:
        raise mixed_rows("an assignment")
    condition = given.reshape(tuple(given.shape) + (1,) * (value.dim() - 1))
    tensor.copy_(torch.where(condition, value.reshape(tensor.shape).to(tensor.dtype), tensor))
