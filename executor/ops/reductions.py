"""Sums and means of all elements or over the first dim, and losses, of tensors that are split.

Each rank reduces its piece, then all do: the result is whole on the axes that split what is reduced. In the backward
its gradient is reduced where it arrives as a partial sum. Rules: ``planner.strategies.reduction_rules``.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cost_model.layouts.layout import Layout
from executor.redistribute import Redistributor, conjugate
from executor.torch_internals.dtensor import local_of, make_dtensor


def total(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return the own op of ``torch.sum`` or ``torch.mean``, or of the method.

    The result is NotImplemented for a sum over some dims without the first, and for a tensor that is whole.
    """
    is_mean = function.__name__ == "mean"

    def run(redistributor: Redistributor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        dims = _reduced_dims(input.dim(), *args, **kwargs)
        layout = _common_layout(redistributor, [input], partial=True)
        if dims is None or layout in (None, redistributor.replicated):
            return NotImplemented
        result = function(_local(redistributor, input, layout), *args, **kwargs)
        if is_mean:
            result = result / math.prod(pieces(redistributor, layout, dim) for dim in dims)
        keeps = result.dim() == input.dim()
        left = [dim for dim in range(input.dim()) if keeps or dim not in dims]
        kept = tuple(
            Shard(left.index(place.dim)) if isinstance(place, Shard) and place.dim not in dims else Replicate()
            for place in layout
        )
        pending = tuple(
            place if whole == place or isinstance(place, Shard) else Partial()
            for place, whole in zip(kept, layout, strict=True)
        )
        return redistributor.redistribute(redistributor.of_pieces(result, pending), kept)

    return run


COMPARISONS = {
    getattr(owner, name): is_above
    for names, is_above in ((("ge", "gt"), True), (("le", "lt"), False))
    for name in (*names, *(f"__{each}__" for each in names))
    for owner in (torch, torch.Tensor)
    if hasattr(owner, name)
}
"""Comparisons -> whether they hold of a largest number if they hold of one."""


def compared(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return the own op of a comparison of the largest or least of all elements with a number: no rank waits.

    It holds of the largest if it holds of that of any rank, or of those of all. The result is NotImplemented for
    other tensors.
    """
    is_above = COMPARISONS[function]

    def run(redistributor: Redistributor, input: Any, other: Any) -> Any:
        if not isinstance(input, DTensor) or input.dim() or not isinstance(other, (int, float)):
            return NotImplemented
        kinds = {place.reduce_op for place in input.placements if isinstance(place, Partial)}
        if kinds not in ({"max"}, {"min"}):
            return NotImplemented
        pending = Partial("max" if (kinds == {"max"}) == is_above else "min")
        layout = tuple(pending if place.is_partial() else place for place in input.placements)
        return make_dtensor(function(local_of(input), other), redistributor.device_mesh, layout, (), ())

    return run


def _reduced_dims(
    count: int, dim: int | Sequence[int] | None = None, keepdim: bool = False, **options: Any
) -> frozenset[int] | None:
    """Return the dims of ``count`` that a call reduces, if the first is among them; None: it is not, or unknown.

    Torch takes ``axis`` and ``keepdims`` as well, as NumPy does.
    """
    dim = options.pop("axis", dim)
    if set(options) - {"dtype", "keepdims"}:
        return None
    given = (dim,) if isinstance(dim, int) else tuple(dim or ())
    dims = frozenset(each % count for each in given) if given and count else frozenset(range(count))
    return dims if 0 in dims or not count else None


def loss(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return the own op of a loss that reduces a number for each element of its input and target."""
    signature = inspect.signature(function)

    def run(redistributor: Redistributor, *args: Any, **kwargs: Any) -> Any:
        call = _arguments(signature, args, kwargs)
        if call is None or call["input"].shape != call["target"].shape:
            return NotImplemented
        tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
        rows = {name: value for name, value in tensors.items() if value.shape == call["input"].shape}
        weights = [value for name, value in tensors.items() if name not in rows]
        layout = _common_layout(redistributor, list(rows.values()))
        if layout is None or not _are_whole(redistributor, weights):
            return NotImplemented
        if weights and any(place.is_shard() and place != Shard(0) for place in layout):
            return NotImplemented
        if any(value.dim() == call["input"].dim() and len(value) > 1 for value in weights):
            return NotImplemented  # weights of the samples, which are split as well
        local = {
            name: _local(redistributor, value, layout if name in rows else redistributor.replicated)
            for name, value in tensors.items()
        }
        result = function(**{**call, **local})
        if call["reduction"] == "none":
            return redistributor.of_pieces(result, layout)
        if call["reduction"] == "mean":
            result = result / pieces(redistributor, layout)
        elif call["reduction"] == "batchmean":
            result = result / pieces(redistributor, layout, dim=0)
        return reduced(redistributor, result, layout)

    return run


def loss_of_classes(
    redistributor: Redistributor, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any
) -> Any:
    """Return ``F.cross_entropy`` or ``F.nll_loss`` of rows that are split: the sum over rows by the sum of weights.

    NotImplemented where anything else is split.
    """
    call = _arguments(_signature_of(function), args, kwargs)
    if call is None or redistributor.zigzag is not None:
        return NotImplemented
    logits, target, weight = call["input"], call["target"], call["weight"]
    layout = _common_layout(redistributor, [logits, target])
    if layout is None or logits.dim() < 2 or any(place.is_shard() and place != Shard(0) for place in layout):
        return NotImplemented
    if weight is not None and not _are_whole(redistributor, [weight]):
        return NotImplemented
    local = {name: _local(redistributor, call[name], layout) for name in ("input", "target")}
    if weight is not None:
        local["weight"] = _local(redistributor, weight, redistributor.replicated)
    rows = function(**{**call, **local, "reduction": "none"})
    if call["reduction"] == "none":
        return redistributor.of_pieces(rows, layout)
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    totals = torch.stack([rows.sum(dtype=dtype), _weights(call, local).to(dtype)])
    loss_sum, weights = reduced(redistributor, totals, layout).unbind()
    return (loss_sum / weights if call["reduction"] == "mean" else loss_sum).to(logits.dtype)


def nll_loss(redistributor: Redistributor, *args: Any, **kwargs: Any) -> Any:
    """Return ``F.nll_loss`` by `loss_of_classes`."""
    return loss_of_classes(redistributor, F.nll_loss, *args, **kwargs)


def _weights(call: dict[str, Any], local: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of this rank's weights, by which a mean divides: those of the rows that are not ignored."""
    x, target, weight = local["input"].detach(), local["target"], local.get("weight")
    if target.is_floating_point():
        return x.new_full((), x.numel() / x.shape[1], dtype=torch.float32)
    counted: torch.Tensor = target != call["ignore_index"]
    if weight is None:
        return counted.sum()
    return torch.where(counted, weight[target.masked_fill(~counted, 0)], 0).sum()


_signature_of = functools.cache(inspect.signature)


def _arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: Any) -> dict[str, Any] | None:
    """Return the arguments of a loss by name; None with the arguments that torch deprecated."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    call = dict(bound.arguments)
    deprecated = [call.pop(name, None) for name in ("size_average", "reduce")]
    return call if deprecated == [None, None] else None


def _common_layout(
    redistributor: Redistributor, tensors: Sequence[torch.Tensor], *, partial: bool = False
) -> Layout | None:
    """Return the layout of all DTensors of ``tensors``; None if they have none in common, or one not covered."""
    layouts = {tuple(tensor.placements) for tensor in tensors if isinstance(tensor, DTensor)}
    if len(layouts) != 1:
        return None
    (layout,) = layouts
    if redistributor.zigzag is not None and not all(isinstance(tensor, DTensor) for tensor in tensors):
        return None
    covered = all(p.is_replicate() or type(p) is Shard or (partial and p == Partial()) for p in layout)
    return layout if covered else None


def _are_whole(redistributor: Redistributor, tensors: Sequence[torch.Tensor]) -> bool:
    return all(tuple(redistributor.as_dtensor(tensor).placements) == redistributor.replicated for tensor in tensors)


def _local(redistributor: Redistributor, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return this rank's piece of ``tensor``, in autograd for a DTensor."""
    if isinstance(tensor, DTensor):
        return tensor.to_local(grad_placements=conjugate(layout))
    return redistributor.to_layout(redistributor.as_dtensor(tensor), layout).to_local()


def pieces(redistributor: Redistributor, layout: Layout, dim: int | None = None) -> int:
    """Return the number of pieces of a tensor in ``layout``, along one dim or in all."""
    splits = (axis for axis, place in enumerate(layout) if place.is_shard(dim))
    return math.prod(map(redistributor.axis_size, splits))


def reduced(redistributor: Redistributor, local: torch.Tensor, layout: Layout) -> DTensor:
    """Return the sum of ``local`` over all axes on which ``layout`` is not replicated."""
    pending = tuple(place if place.is_replicate() else Partial() for place in layout)
    return redistributor.redistribute(redistributor.of_pieces(local, pending), redistributor.replicated)


LOSSES = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.soft_margin_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
)
