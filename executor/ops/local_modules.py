"""Local modules: each rank runs the module's own forward on its local tensors, without DTensor.

Inside such a module the plan redistributes and reduces nothing: parameters are replicated, and the batch is split or
whole (`executor.find_local_modules`). DTensor would run the same kernels, and find their layouts anew for every op,
which takes the host many times as long. The gradient of a parameter is a sum over the ranks with different pieces.

Where a call has other arguments or layouts than planned, DTensor runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, sharded_dim
from executor.ops.dispatch import OwnOps
from executor.redistribute import Redistributor, conjugate, contiguous_stride
from executor.torch_internals.dtensor import (
    TensorSpec,
    like_dtensor,
    local_of,
    run_function,
    spec_of,
    spec_with,
    waited,
)
from executor.torch_internals.function_modes import without_mode
from executor.torch_internals.random import random_region
from executor.torch_internals.shown_parameters import Slot, sharded_slots, showing
from planner.model_rewrites.local_module import LocalModule
from planner.model_rewrites.selected_rows.selection import selection_of
from planner.model_rewrites.tree_paths import tensors_by_path, tensors_in


def run_local_modules(module: nn.Module, texts: Mapping[str, str], redistributor: Redistributor) -> None:
    """Replace the forward of each local module in ``module``. Call this before all other wrappers of forwards.

    Args:
        texts: FQN -> `LocalModule` as text.
    """
    for fqn, text in texts.items():
        part = module.get_submodule(fqn)
        part.forward = functools.wraps(part.forward)(LocalForward(part, LocalModule.parse(text), redistributor))


class LocalForward:
    """The forward of a local module.

    Attributes:
        running: how many of these forwards run on local tensors at the moment.
    """

    running: ClassVar[int] = 0

    def __init__(self, module: nn.Module, local: LocalModule, redistributor: Redistributor) -> None:
        self._module, self._local, self._redistributor = module, local, redistributor
        self._forward = module.forward
        self._parts = tuple(module.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; arguments are DTensors, plain tensors that are whole, and numbers."""
        by_path = tensors_by_path(args, kwargs)
        slots = self._slots()
        # Selected rows (`planner.model_rewrites.selected_rows`) stay with DTensor, which keeps what selected them.
        is_plain = slots is not None and not any(map(selection_of, by_path.values()))
        split = self._split_axes(args, kwargs, by_path) if is_plain else None
        if split is None:
            return self._forward(*args, **kwargs)
        assert slots is not None
        LocalForward.running += 1
        try:
            with without_mode(OwnOps):
                output = self._run(args, kwargs, by_path, slots, split)
        finally:
            LocalForward.running -= 1
        # None: an argument asked for more results than planned, or something in the module needs DTensors.
        return self._forward(*args, **kwargs) if output is None else output[0]

    def _run(
        self, args: Any, kwargs: Any, by_path: Mapping[str, torch.Tensor], slots: Sequence[Slot], split: frozenset[int]
    ) -> tuple[Any] | None:
        """Return the results of the forward on local tensors, as DTensors; None where they are other than planned."""
        given, parameters = self._entered(by_path.values(), [parameter for _, _, parameter in slots], split)
        tensors = iter(given)
        local_args, local_kwargs = pytree.tree_map_only(torch.Tensor, lambda _: next(tensors), (args, kwargs))
        region = random_region(self._shard_of(split)) if split and self._local.is_random else nullcontext()
        with showing(slots, parameters), region:
            output = self._forward(*local_args, **local_kwargs)
        results = tensors_in(output)
        if len(results) != len(self._local.outputs) or any(isinstance(result, DTensor) for result in results):
            return None
        return (self._left(output, split),)

    @property
    def _axes(self) -> int:
        return len(self._redistributor.replicated)

    def _slots(self) -> list[Slot] | None:
        """Return the parameters to show as local tensors; None where the module has changed, or has sharded ones."""
        parts = tuple(self._module.modules())
        if parts != self._parts:
            return None
        slots = sharded_slots(parts)
        is_whole = all(
            place.is_replicate() or self._redistributor.axis_size(axis) == 1
            for _, _, parameter in slots
            for axis, place in enumerate(parameter.placements)
        )
        return slots if is_whole else None

    def _split_axes(self, args: Any, kwargs: Any, by_path: Mapping[str, torch.Tensor]) -> frozenset[int] | None:
        """Return the mesh axes on which the arguments are split as planned, all others being whole; else None."""
        planned = self._local.inputs
        found = {path: tensor for path, tensor in by_path.items() if isinstance(tensor, DTensor)}
        if found.keys() != planned.keys() or not all(map(is_plain_data, pytree.tree_leaves((args, kwargs)))):
            return None
        if any(tensor.requires_grad for path, tensor in by_path.items() if path not in found):
            return None
        if any(map(self._redistributor.is_uneven, found.values())):
            return None
        split: set[int] = set()
        for axis in range(self._axes):
            if self._redistributor.axis_size(axis) == 1:
                continue
            is_split = [
                found[path].placements[axis] == layout[axis]
                for path, layout in planned.items()
                if sharded_dim(layout[axis]) is not None
            ]
            if any(is_split):
                split.add(axis)
            for path, layout in planned.items():
                place = found[path].placements[axis]
                expected = layout[axis] if axis in split else Replicate()
                if place != expected:
                    return None
        return frozenset(split)

    def _entered(
        self, arguments: Any, parameters: Sequence[DTensor], split: frozenset[int]
    ) -> tuple[list[torch.Tensor], dict[DTensor, torch.Tensor]]:
        """Return the arguments as local tensors, and each parameter with its local tensor, in autograd.

        Where the module is split, the gradient of what is whole is a sum over the ranks.
        """

        def of_gradient(tensor: DTensor) -> Layout:
            return tuple(
                Partial() if axis in split and place.is_replicate() else place
                for axis, place in enumerate(tensor.placements)
            )

        given = list(arguments)
        distinct = list(dict.fromkeys(parameters))
        dtensors = [tensor for tensor in given if isinstance(tensor, DTensor)]
        specs = [_gradient_spec(spec_of(tensor), of_gradient(tensor)) for tensor in (*dtensors, *distinct)]
        local = iter(run_function(_Enter, specs, *dtensors, *distinct) if specs else ())
        arguments = [next(local) if isinstance(tensor, DTensor) else tensor for tensor in given]
        return arguments, dict(zip(distinct, local, strict=True))

    def _shard_of(self, split: frozenset[int]) -> Layout:
        """Return a layout that is sharded on the axes ``split``, where ranks draw different random numbers."""
        layouts = list(self._local.inputs.values())
        return tuple(
            next(layout[axis] for layout in layouts if sharded_dim(layout[axis]) is not None)
            if axis in split
            else Replicate()
            for axis in range(self._axes)
        )

    def _left(self, output: Any, split: frozenset[int]) -> Any:
        """Return the results as DTensors."""
        leaves, structure = pytree.tree_flatten(output)
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        layouts = {
            position: tuple(
                place if axis in split or self._redistributor.axis_size(axis) == 1 else Replicate()
                for axis, place in enumerate(layout)
            )
            for position, layout in zip(positions, self._local.outputs, strict=True)
            if layout is not None
        }
        leaving = [leaves[position] for position in layouts]
        results = run_function(_Leave, self._redistributor, tuple(layouts.values()), split, *leaving) if leaving else ()
        for position, result in zip(layouts, results, strict=True):
            leaves[position] = result
        return pytree.tree_unflatten(leaves, structure)


def is_plain_data(leaf: Any) -> bool:
    """Return whether an argument is a tensor, or says nothing that could hold one: no cache, for instance."""
    return leaf is None or isinstance(leaf, (torch.Tensor, bool, int, float, str, torch.dtype, torch.device))


def _gradient_spec(spec: TensorSpec, layout: Layout) -> TensorSpec:
    """Return the spec of the contiguous gradient, in ``layout``, of a tensor with ``spec``."""
    return spec_with(spec, layout, contiguous_stride(spec.shape))


class _Enter(torch.autograd.Function):
    """The local tensors of DTensors; their gradients are DTensors with ``specs``."""

    @staticmethod
    def forward(ctx: Any, specs: list[TensorSpec], *tensors: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.specs = specs
        local = tuple(waited(local_of(tensor)).detach() for tensor in tensors)
        pairs = zip(tensors, local, strict=True)
        ctx.mark_non_differentiable(*(each for tensor, each in pairs if not tensor.requires_grad))
        return local

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        return None, *(
            None if gradient is None else like_dtensor(gradient.contiguous(), spec)
            for gradient, spec in zip(gradients, ctx.specs, strict=True)
        )


class _Leave(torch.autograd.Function):
    """The DTensors in ``layouts`` of local tensors, which are even pieces.

    Gradients come in the same layouts; on the axes ``split``, the gradient of what is whole is an addend of each rank.
    """

    @staticmethod
    def forward(
        ctx: Any, redistributor: Redistributor, layouts: tuple[Layout, ...], split: frozenset[int], *local: torch.Tensor
    ) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.redistributor, ctx.layouts, ctx.split = redistributor, layouts, split
        results = tuple(redistributor.of_pieces(each, layout) for each, layout in zip(local, layouts, strict=True))
        pairs = zip(local, results, strict=True)
        ctx.mark_non_differentiable(*(result for each, result in pairs if not each.requires_grad))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return (
            *(None, None, None),
            *(
                None if gradient is None else _addend(gradient, layout, ctx.redistributor, ctx.split)
                for gradient, layout in zip(gradients, ctx.layouts, strict=True)
            ),
        )


def _addend(
    gradient: torch.Tensor, layout: Layout, redistributor: Redistributor, split: frozenset[int]
) -> torch.Tensor:
    """Return this rank's gradient of a result in ``layout``."""
    dtensor = redistributor.as_dtensor(gradient)
    given = tuple(dtensor.placements)
    whole = [axis for axis in split if layout[axis].is_replicate()]
    kept = [axis for axis in whole if given[axis].is_partial()]
    target = tuple(given[axis] if axis in kept else place for axis, place in enumerate(conjugate(layout)))
    local = local_of(redistributor.to_layout(dtensor, target))
    counted_here = all(redistributor.coordinate(axis) == 0 for axis in whole if axis not in kept)
    return local if counted_here else torch.zeros_like(local)
