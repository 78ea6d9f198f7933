"""Local ops: ops for which DTensor has no rule run on each rank's local tensors (`planner.strategies.local_ops`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, sharded_dim
from executor.redistribute import Redistributor
from executor.torch_internals.dtensor import run_function
from executor.torch_internals.random import random_region
from planner.model_rewrites.independent_dims import (
    Dims,
    check_recurrent,
    check_selected,
    scatters_packed_rows,
    split_outputs,
    with_plain_split,
    without_chance,
)

_MOST_SPLITS = 4096
"""Trials that are remembered."""


def run_local(
    redistributor: Redistributor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the result of ``func``, run on local tensors; NotImplemented where its inputs' layouts are not covered.

    On each axis all DTensors are replicated, or some of them are split on a dim along which ``func`` works piece by
    piece.
    """
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    dtensors = {position: leaf for position, leaf in enumerate(leaves) if isinstance(leaf, DTensor)}
    tensors = {position: leaf for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}

    def call(given: Mapping[int, torch.Tensor], *, is_trial: bool = False) -> Any:
        filled = [given.get(position, leaf) for position, leaf in enumerate(leaves)]
        if is_trial:
            filled = [without_chance(func.__name__, leaf) for leaf in filled]
        called_args, called_kwargs = pytree.tree_unflatten(filled, structure)
        check_recurrent(func.__name__, called_args)
        return func(*called_args, **called_kwargs)

    split_on: list[Dims] = []
    outputs_on: list[Dims | None] = []
    for axis in range(redistributor.device_mesh.ndim):
        places = {position: tensor.placements[axis] for position, tensor in dtensors.items()}
        if not all(place.is_replicate() or type(place) is Shard for place in places.values()):
            return NotImplemented
        dims = tuple(sharded_dim(places[p]) if p in places else None for p in tensors)
        outputs = None
        if any(dim is not None for dim in dims):
            # Packed rows that are whole, as those that `generate` makes before the forward, are cut as plain tensors.
            is_packed = scatters_packed_rows(func.__name__, [tensor.shape for tensor in tensors.values()])
            plain = [i for i, p in enumerate(tensors) if p not in dtensors or (is_packed and dims[i] is None)]
            key = func, str(structure), _constants(leaves), _shapes(tensors), dims
            trial = functools.partial(_trial, functools.partial(call, is_trial=True), func, tensors, dims, plain)
            split = _remembered(key, trial)
            if split is None:
                return NotImplemented
            dims, outputs = split
        split_on.append(dims)
        outputs_on.append(outputs)
    local = {
        position: run_function(ContiguousGradient, tensor.to_local(grad_placements=_gradient(tensor, split_on)))
        for position, tensor in dtensors.items()
    }
    for index, (position, tensor) in enumerate(tensors.items()):
        layout = tuple(dtensors[position].placements) if position in dtensors else redistributor.replicated
        cut = [dims[index] if place.is_replicate() else None for dims, place in zip(split_on, layout, strict=True)]
        local[position] = _piece(redistributor, local.get(position, tensor), cut)
    for dims in split_on:
        check_selected(func.__name__, dims, [local[position] for position in tensors])
    first = next(iter(dtensors.values()))
    with nullcontext() if first.is_meta else random_region(first.placements):
        results, result_structure = pytree.tree_flatten(call(local))
    index = 0
    wrapped = []
    for result in results:
        if isinstance(result, torch.Tensor):
            layout = tuple(_place(None if outputs is None else outputs[index]) for outputs in outputs_on)
            wrapped.append(redistributor.of_pieces(result, layout))
            index += 1
        else:
            wrapped.append(result)
    return pytree.tree_unflatten(wrapped, result_structure)


class ContiguousGradient(torch.autograd.Function):
    """The identity; its gradient is contiguous, as DTensor takes it to be. That of a mean, for one, is expanded."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


def _place(dim: int | None) -> Placement:
    return Replicate() if dim is None else Shard(dim)


def _gradient(tensor: DTensor, split_on: list[Dims]) -> Layout:
    """Return the layout of the gradient of a local tensor: a sum over the ranks that have different pieces."""
    return tuple(
        Partial() if place.is_replicate() and any(dim is not None for dim in dims) else place
        for place, dims in zip(tensor.placements, split_on, strict=True)
    )


def _piece(redistributor: Redistributor, plain: torch.Tensor, split_on: Sequence[int | None]) -> torch.Tensor:
    """Return this rank's piece of a tensor, which is whole along the axes that have a dim here; None: it stays so."""
    for axis, dim in enumerate(split_on):
        if dim is not None:
            length = plain.shape[dim] // redistributor.axis_size(axis)
            plain = plain.narrow(dim, redistributor.coordinate(axis) * length, length).contiguous()
    return plain


def _trial(
    call: Callable[[Mapping[int, torch.Tensor]], Any],
    func: Callable[..., Any],
    tensors: Mapping[int, torch.Tensor],
    dims: Dims,
    plain: Collection[int],
) -> tuple[Dims, Dims] | None:
    """Return the dims on which the tensors are split, and the results, where those of DTensors are ``dims``."""
    positions, shapes = list(tensors), [tuple(tensor.shape) for tensor in tensors.values()]

    def outputs_of(tried: Dims) -> Dims | None:
        dtypes = [tensor.dtype for tensor in tensors.values()]
        run = functools.partial(_filled, call, positions)
        return split_outputs(run, shapes, dtypes, tried, func.__name__)

    return with_plain_split(outputs_of, shapes, dims, plain, func.__name__)


def _filled(
    call: Callable[[Mapping[int, torch.Tensor]], Any], positions: Sequence[int], given: Sequence[torch.Tensor]
) -> Any:
    return call(dict(zip(positions, given, strict=True)))


_results: dict[Any, tuple[Dims, Dims] | None] = {}


def _remembered(key: Any, trial: Callable[[], tuple[Dims, Dims] | None]) -> tuple[Dims, Dims] | None:
    if key not in _results:
        if len(_results) >= _MOST_SPLITS:
            _results.clear()
        _results[key] = trial()
    return _results[key]


def _constants(leaves: list[Any]) -> tuple[str, ...]:
    return tuple("" if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)


def _shapes(tensors: Mapping[int, torch.Tensor]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors.values())
