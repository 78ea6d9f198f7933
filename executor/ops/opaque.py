"""Opaque modules: their own forward runs on whole local tensors, or on this rank's samples.

Rules: ``planner.strategies.local_ops.opaque_rules``. The gradient of a parameter, or of another tensor that is whole,
is a sum over the ranks that have different samples.

Ranks with different samples may use different parameters, such as those of an expert that no sample of one of them
chose. All of them still take part in the collectives of all parameters: in those that gather a parameter again for the
backward, and in the reduction of its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, format_layout
from executor.ops.local import ContiguousGradient
from executor.ops.reductions import pieces, reduced
from executor.redistribute import Redistributor
from executor.torch_internals.dtensor import run_function, storage_key
from executor.torch_internals.random import random_region
from executor.torch_internals.shown_parameters import sharded_slots, showing
from planner.errors import PlanLayoutError
from planner.model_rewrites.assumed_values import AssumedValues
from planner.model_rewrites.image_sizes.packed_attention import packed_attention
from planner.model_rewrites.image_sizes.values import is_numbers
from planner.model_rewrites.opaque_op import MEAN, SAMPLES, SampleSplit
from planner.model_rewrites.tree_paths import tensors_by_path, tensors_in


def run_opaque(module: nn.Module, splits: Mapping[str, str], redistributor: Redistributor) -> None:
    """Replace the forward of each opaque module in ``module``.

    Args:
        splits: FQN -> `SampleSplit` as text; "" where it runs on whole tensors only.
    """
    for fqn, text in splits.items():
        part = module.get_submodule(fqn)
        forward = _OpaqueForward(fqn, part, SampleSplit.parse(text), redistributor)
        part.forward = functools.wraps(part.forward)(forward)


class _OpaqueForward:
    """The forward of an opaque module."""

    def __init__(self, fqn: str, module: nn.Module, split: SampleSplit | None, redistributor: Redistributor) -> None:
        self._fqn, self._module, self._split, self._redistributor = fqn, module, split, redistributor
        self._forward = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        by_path = tensors_by_path(args, kwargs)
        tensors = list(by_path.values())
        parameters: list[Any] = [p for part in self._module.modules() for p in part._parameters.values()]
        if not any(isinstance(tensor, DTensor) for tensor in (*tensors, *parameters)):
            return self._forward(*args, **kwargs)
        with_samples = self._paths_with_samples(by_path) | {path for path, t in by_path.items() if is_numbers(t)}
        by_samples = self._sample_axes(by_path, with_samples)
        given = iter([self._local(tensor, path in with_samples, by_samples) for path, tensor in by_path.items()])
        local_args, local_kwargs = pytree.tree_map_only(torch.Tensor, lambda _: next(given), (args, kwargs))
        layout = tuple(Shard(0) if axis in by_samples else Replicate() for axis in range(self._axes))
        packed = packed_attention(self._module) if any(map(is_numbers, tensors)) else nullcontext()
        with packed, self._local_parameters(by_samples) as local_parameters:
            if any(tensor is not None and tensor.is_meta for tensor in (*tensors, *parameters)):
                output = self._on_meta(local_args, local_kwargs, local_parameters)
            else:
                with random_region(layout):
                    output = self._forward(*local_args, **local_kwargs)
                output = _with_parameters(output, local_parameters, need_gradients=bool(by_samples))
        return self._wrapped(output, layout)

    def _paths_with_samples(self, by_path: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return the paths of the arguments that are split where the samples are.

        An argument that the planned call did not have, such as a mask, is one of them if it has as many rows.
        """
        if self._split is None:
            return frozenset()
        known = self._split.inputs
        samples = next((len(tensor) for path, tensor in by_path.items() if known.get(path) == SAMPLES), None)
        more = {
            path for path, tensor in by_path.items() if path not in known and tensor.dim() and len(tensor) == samples
        }
        return frozenset(more | {path for path in by_path if known.get(path) == SAMPLES})

    @property
    def _axes(self) -> int:
        return len(self._redistributor.replicated)

    def _sample_axes(self, by_path: Mapping[str, torch.Tensor], with_samples: Collection[str]) -> frozenset[int]:
        """Return the mesh axes on which the arguments ``with_samples`` are split by samples.

        Raises:
            PlanLayoutError: the arguments have other layouts than a plan gives them.
        """
        axes: set[int] = set()
        for path, tensor in by_path.items():
            for axis, placement in enumerate(tensor.placements if isinstance(tensor, DTensor) else ()):
                if placement == Shard(0) and path in with_samples:
                    axes.add(axis)
                elif not placement.is_replicate() and self._redistributor.axis_size(axis) > 1:
                    raise PlanLayoutError(
                        f"{self._fqn or 'the root module'} is opaque, and its argument {path} is in "
                        f"{format_layout(tuple(cast(DTensor, tensor).placements))}.",
                        what_to_do="Give it whole tensors, or plan the model with build_plan.",
                    )
        return frozenset(axes)

    def _local(self, tensor: torch.Tensor, is_split: bool, by_samples: frozenset[int]) -> torch.Tensor:
        """Return this rank's part of an argument or a parameter."""
        placements = tuple(Shard(0) if is_split and axis in by_samples else Replicate() for axis in range(self._axes))
        if not isinstance(tensor, DTensor):
            if placements == self._redistributor.replicated:
                return tensor
            tensor = self._redistributor.as_dtensor(tensor)
        if tuple(tensor.placements) != placements:
            tensor = self._redistributor.to_layout(tensor, placements)
        gradient: Layout = tuple(
            Partial() if axis in by_samples and not is_split else place for axis, place in enumerate(placements)
        )
        local: torch.Tensor = run_function(ContiguousGradient, tensor.to_local(grad_placements=gradient))
        return local

    @contextmanager
    def _local_parameters(self, by_samples: frozenset[int]) -> Iterator[list[torch.Tensor]]:
        """Within this context, the module has its parameters as local tensors."""
        slots = sharded_slots(self._module.modules())
        distinct = dict.fromkeys(parameter for _, _, parameter in slots)
        local = {parameter: self._local(parameter, False, by_samples) for parameter in distinct}
        with showing(slots, local):
            yield list(local.values())

    def _on_meta(self, args: Any, kwargs: Any, parameters: Sequence[torch.Tensor]) -> Any:
        """Return results without values (`StepOnMeta` assumes some); autograd saves what the forward saves."""
        storages: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages.add(storage_key(tensor))
            return tensor

        AssumedValues.restart_numbers()
        args, kwargs = AssumedValues.on_meta((args, kwargs))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self._forward(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(output)
        arguments = tensors_in((args, kwargs))
        saved = [storage_key(tensor) in storages for tensor in arguments] + [True] * len(parameters)
        results = iter(run_function(_FromAll, tensors_in(leaves), saved, *arguments, *parameters))
        filled = [next(results) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(filled, structure)

    def _wrapped(self, output: Any, layout: Layout) -> Any:
        """Return the local results as DTensors: split by samples, or reduced to whole numbers."""
        places = iter(self._split.outputs if self._split is not None and Shard(0) in layout else ())

        def wrap(result: torch.Tensor) -> torch.Tensor:
            place = next(places, None)
            if place is None:
                return self._redistributor.of_pieces(result, self._redistributor.replicated)
            if place == SAMPLES:
                return self._redistributor.of_pieces(result, layout)
            return reduced(
                self._redistributor, result / pieces(self._redistributor, layout) if place == MEAN else result, layout
            )

        return pytree.tree_map_only(torch.Tensor, wrap, output)


def _with_parameters(output: Any, parameters: Sequence[torch.Tensor], *, need_gradients: bool) -> Any:
    """Return ``output``, whose backward reads all of ``parameters``, used or not.

    Args:
        need_gradients: whether it also gives each of them a gradient, of zeros where it is not used.
    """
    leaves, structure = pytree.tree_flatten(output)
    first = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad), None)
    if first is not None and torch.is_grad_enabled():
        # A detached one keeps its memory, and its gradient None.
        read = parameters if need_gradients else [parameter.detach() for parameter in parameters]
        leaves[first] = run_function(_WithParameters, leaves[first], *read)
    return pytree.tree_unflatten(leaves, structure)


class _WithParameters(torch.autograd.Function):
    """The identity of a tensor; its backward runs before that of the module."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parameters = ctx.saved_tensors  # those that are not saved but gathered again, are gathered now
        return gradient, *(
            gradient.new_zeros((), dtype=parameter.dtype).expand(parameter.shape) if is_needed else None
            for parameter, is_needed in zip(parameters, ctx.needs_input_grad[1:], strict=True)
        )


class _FromAll(torch.autograd.Function):
    """Returns ``results``, on the meta device, as if they were computed from all other tensors."""

    @staticmethod
    def forward(
        ctx: Any, results: list[torch.Tensor], saved: list[bool], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*(tensor for tensor, is_saved in zip(tensors, saved, strict=True) if is_saved))
        ctx.like = [(t.shape, t.dtype) for t in tensors]
        copies = tuple(torch.empty_like(result) for result in results)
        pairs = zip(results, copies, strict=True)
        ctx.mark_non_differentiable(*(copied for result, copied in pairs if not result.requires_grad))
        return copies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  what is not saved but computed again, is computed now
        return None, None, *(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.like)
