"""Losses and totals of selected rows: they count the rows that the mask selects."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from planner.model_rewrites.selected_rows.selection import Selection, mixed_rows, selection_of, with_rows

_NEVER = -100
"""The class that cross entropy ignores where the call names none."""

CLASS_LOSSES = frozenset({F.cross_entropy, F.nll_loss})
ELEMENT_LOSSES = frozenset(
    {
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.kl_div,
    }
)
TOTALS = {torch.sum: "sum", torch.Tensor.sum: "sum", torch.mean: "mean", torch.Tensor.mean: "mean"}


def loss_of_classes(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], selection: Selection
) -> Any:
    """Return a loss of class indices or probabilities over the rows of ``selection``; arguments are those of ``func``.

    Raises:
        ModelError: the input or the target is not selected.
    """
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | kwargs
    target = given["target"]
    if selection_of(given["input"]) is None or selection_of(target) is None or not _has_plain_reduction(given):
        raise mixed_rows(func.__name__)
    if target.is_floating_point():
        return loss_of_elements(func, args, kwargs, selection)
    ignored = given.setdefault("ignore_index", _NEVER)
    condition = selection.rows.reshape((-1,) + (1,) * (target.dim() - 1))
    given["target"] = torch.where(condition, target, ignored)
    result = func(**given)
    if given.get("reduction") == "none":
        with_rows("", result, selection)
    return result


def ctc_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the CTC loss of targets that a mask [samples, longest] selects, called as `F.ctc_loss` is.

    Raises:
        ModelError: other arguments are selected, or the mask has no dim of samples.
    """
    names = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
    given = dict(zip(names, args, strict=False)) | kwargs
    selection = selection_of(given["targets"])
    others = (value for name, value in given.items() if name != "targets")
    if selection is None or selection.mask.dim() != 2 or any(selection_of(other) is not None for other in others):
        raise mixed_rows("ctc_loss")
    # Those that count first, in their order: where they end, the lengths of the targets say.
    order = (~selection.mask).to(torch.int8).argsort(dim=1, stable=True)
    given["targets"] = given["targets"].reshape(selection.mask.shape).gather(1, order)
    return F.ctc_loss(**given)


def loss_of_elements(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], selection: Selection
) -> Any:
    """Return a loss of an input and a target of one shape over the rows of ``selection``, called as ``func`` is.

    Raises:
        ModelError: the input or the target is not selected, or more than these two are given without a name.
    """
    given = dict(zip(("input", "target"), args, strict=False)) | kwargs
    pair = given["input"], given["target"]
    if len(args) > 2 or any(selection_of(each) is None for each in pair) or not _has_plain_reduction(given):
        raise mixed_rows(func.__name__)
    others = [value for value in given.values() if isinstance(value, torch.Tensor) and selection_of(value) is None]
    if any(tensor.dim() >= pair[0].dim() for tensor in others):
        raise mixed_rows(func.__name__)
    reduction = given.pop("reduction", "mean")
    losses = with_rows("", func(**given, reduction="none"), selection)
    if reduction == "none":
        return losses
    if reduction == "batchmean":
        return _sum(losses, selection.rows, None, keepdim=False) / selection.rows.sum()
    return total_of_rows(reduction, (losses,), {}, selection.rows)


def _has_plain_reduction(given: dict[str, Any]) -> bool:
    return given.get("size_average") is None and given.get("reduce") is None


def total_of_rows(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], mask: torch.Tensor) -> Any:
    """Return a sum or a mean over rows that ``mask`` selects; NotImplemented if it is over other dims."""
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    rows, dim = given["input"], given.get("dim", given.get("axis"))
    named = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    dims = sorted({each % rows.dim() for each in named or range(rows.dim())})
    if 0 not in dims:
        return NotImplemented
    if given.get("dtype") is not None:
        rows = rows.to(given["dtype"])
    total = _sum(rows, mask, dims if named else None, keepdim=bool(given.get("keepdim", False)))
    if kind == "sum":
        return total
    return total / (mask.sum() * math.prod(rows.shape[each] for each in dims if each))


def _sum(rows: torch.Tensor, mask: torch.Tensor, dims: list[int] | None, *, keepdim: bool) -> torch.Tensor:
    kept = torch.where(mask.reshape((-1,) + (1,) * (rows.dim() - 1)), rows, 0)
    return kept.sum() if dims is None else kept.sum(dims, keepdim=keepdim)
