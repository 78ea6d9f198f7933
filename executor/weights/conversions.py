"""Conversions of transformers' checkpoints, as lazy tensors: experts stacked and packed, projections split.

The operations that most models have are views: a rank reads only what it stores. Any other operation is run by
transformers on whole tensors, one result at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from executor.weights.lazy_tensors import (
    ComputedTensor,
    LazyTensor,
    SelectedTensor,
    TransposedTensor,
    concatenated,
    full_indices,
    stacked,
)

Sources = dict[str, list[LazyTensor]]
"""Pattern -> the tensors of a checkpoint that match it, in order."""


def converted(converter: Any, sources: Sources, first_name: str, skeleton: Any) -> dict[str, LazyTensor]:
    """Return name in the model -> tensor, of the tensors that one ``WeightConverter`` makes.

    Args:
        converter: transformers' converter.
        sources: the tensors that it takes.
        first_name: the first name in the model that it makes.
        skeleton: the model without values.
    """
    results: Mapping[str, LazyTensor] | None = _as_views(converter, sources, first_name, skeleton)
    if results is None:
        return _computed(converter, sources, first_name, skeleton)
    # As in WeightConverter.convert: patterns become names.
    full_name = first_name.replace("*.", "0.")
    for pattern in results:
        before, matched, after = full_name.partition(pattern)
        if matched:
            return {before + name + after: tensor for name, tensor in results.items()}
    return dict(results)


def _as_views(converter: Any, sources: Sources, first_name: str, skeleton: Any) -> dict[str, LazyTensor] | None:
    """Return pattern -> result of the converter's operations; None if one of them is no view."""
    current: dict[str, LazyTensor | list[LazyTensor]] = dict(sources)
    for operation in converter.operations:
        operate = _VIEWS.get(type(operation).__name__)
        if operate is None:
            return None
        current = operate(operation, current, converter, first_name, skeleton)
    return {pattern: _one(tensor) for pattern, tensor in current.items()}


_Current = dict[str, LazyTensor | list[LazyTensor]]


def _one(tensors: LazyTensor | list[LazyTensor]) -> LazyTensor:
    return tensors[0] if isinstance(tensors, list) else tensors


def _all(tensors: LazyTensor | list[LazyTensor]) -> list[LazyTensor]:
    return tensors if isinstance(tensors, list) else [tensors]


def _merge(operation: Any, current: _Current, converter: Any, first_name: str, skeleton: Any) -> _Current:
    return {
        operation.get_target_pattern(len(current), pattern, converter.target_patterns): stacked(
            _all(tensors), operation.dim
        )
        for pattern, tensors in current.items()
    }


def _concatenate(operation: Any, current: _Current, converter: Any, first_name: str, skeleton: Any) -> _Current:
    parts = [part for pattern in converter.source_patterns if pattern in current for part in _all(current[pattern])]
    return {operation.get_target_pattern(converter.target_patterns): concatenated(parts, operation.dim)}


def _chunk(operation: Any, current: _Current, converter: Any, first_name: str, skeleton: Any) -> _Current:
    source = _one(next(iter(current.values())))
    patterns = operation.get_target_patterns(converter.target_patterns, config=skeleton.config)
    pieces = torch.arange(source.shape[operation.dim]).chunk(len(patterns))
    return _selected(source, operation.dim, patterns, pieces)


def _split(operation: Any, current: _Current, converter: Any, first_name: str, skeleton: Any) -> _Current:
    source, patterns = _one(next(iter(current.values()))), converter.target_patterns
    names = [first_name.replace(patterns[0], pattern) for pattern in patterns]
    sizes = [skeleton.get_parameter(name).shape[operation.dim] for name in names]
    pieces = torch.arange(source.shape[operation.dim]).split(sizes)
    return _selected(source, operation.dim, patterns, pieces)


def _transpose(operation: Any, current: _Current, converter: Any, first_name: str, skeleton: Any) -> _Current:
    source = _one(next(iter(current.values())))
    pattern = operation.get_target_pattern(current, converter.source_patterns, converter.target_patterns)
    if operation.check_dims and source.shape == skeleton.get_parameter(first_name).shape:
        return {pattern: source}
    return {pattern: TransposedTensor(source, operation.dim0 % len(source.shape), operation.dim1 % len(source.shape))}


def _selected(source: LazyTensor, dim: int, patterns: Sequence[str], pieces: Sequence[torch.Tensor]) -> _Current:
    return {
        pattern: SelectedTensor(source, dim % len(source.shape), piece)
        for pattern, piece in zip(patterns, pieces, strict=True)
    }


_VIEWS = {
    "MergeModulelist": _merge,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
}
"""Class of a conversion operation -> the same operation on lazy tensors."""


def _computed(converter: Any, sources: Sources, first_name: str, skeleton: Any) -> dict[str, LazyTensor]:
    """Return the results of ``converter``, each computed by transformers when it is needed."""

    def compute(values: Mapping[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(converter)
        for pattern, tensors in values.items():
            for tensor in tensors:
                own.add_tensor(first_name, pattern, pattern, tensor)
        results = own.convert(first_name, model=skeleton, config=skeleton.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in results.items()}

    def compute_one(name: str) -> torch.Tensor:
        whole = {
            pattern: [tensor.prepared().read(full_indices(tensor.shape)) for tensor in tensors]
            for pattern, tensors in sources.items()
        }
        return compute(whole)[name]

    on_meta = compute(
        {
            pattern: [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors]
            for pattern, tensors in sources.items()
        }
    )
    return {
        name: ComputedTensor(tensor.shape, tensor.dtype, lambda name=name: compute_one(name))  # type: ignore[misc]
        for name, tensor in on_meta.items()
    }
