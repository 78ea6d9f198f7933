"""Parameters at use: every module sees the compute dtype, and only their reader's forward sees the compute layout.

Between steps a parameter is sharded and in its stored dtype. During a forward or a recomputation
``ComputeDtypeParameters`` shows it cast to all modules; while its reader's forward runs (that of its owner, or of a
module around it), ``ComputeLayoutForward`` also redistributes it to its compute layout. In backward the gradient stays
in the layout in which the op gives it, for instance partial, until ``grad_reduction`` reduces it once a step. If
``gradient_plan`` has a layout for the parameter, every backward redistributes the gradient to that layout. Parameters
of FSDP groups are handled by ``executor.runtime.fully_sharded`` instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cost_model.layouts.layout import Layout
from executor.redistribute import Redistributor
from executor.resolve.parameter_layouts import ParameterLayouts
from executor.runtime.saved_tensor_recompute import CheckpointedRegion, RecomputedCopy, recompute_copies
from executor.torch_internals.dtensor import local_of, make_dtensor, run_function

CastParameters = Mapping[nn.Parameter, DTensor]
"""Parameter -> the parameter cast to the compute dtype."""


class ComputeDtypeParameters:
    """Shows modules their parameters in the compute dtype, as if the model had been built in it."""

    def __init__(self, by_owner: Mapping[nn.Module, Sequence[ParameterLayouts]], dtype: torch.dtype) -> None:
        """Select the floating-point parameters in ``by_owner`` whose dtype is not ``dtype``. They are DTensors."""
        self._dtype = dtype
        self._slots: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for owner, owned in by_owner.items():
            slots = {layouts.attribute: layouts.parameter for layouts in owned}
            slots = {name: p for name, p in slots.items() if p.is_floating_point() and p.dtype != dtype}
            if slots:
                self._slots[owner] = slots
        self.current: CastParameters = {}

    @contextmanager
    def cast(self) -> Iterator[None]:
        """Return a context for a forward: modules see cast parameters, and gradients reach the original parameters."""
        parameters = dict.fromkeys(p for slots in self._slots.values() for p in slots.values())
        with self.shown({p: run_function(_Cast, p, self._dtype) for p in parameters}, self._slots):
            yield

    def slots_in(self, block: nn.Module) -> dict[nn.Module, dict[str, nn.Parameter]]:
        """Return module -> attribute -> parameter to cast, for ``block`` and its submodules."""
        return {module: self._slots[module] for module in block.modules() if module in self._slots}

    @contextmanager
    def shown(
        self, parameters: CastParameters, slots: Mapping[nn.Module, Mapping[str, nn.Parameter]]
    ) -> Iterator[None]:
        """Return a context in which the modules in ``slots`` see ``parameters``: in a recomputation, its forward's."""
        before, self.current = self.current, parameters
        try:
            for module, names in slots.items():
                for name, parameter in names.items():
                    # Not by register_parameter, which accepts only leaves.
                    module._parameters[name] = cast(nn.Parameter, parameters[parameter])
            yield
        finally:
            self.current = before
            for module, names in slots.items():
                module._parameters.update(names)


class ComputeLayoutForward:
    """A module's forward, during which the parameters that it reads are in their compute layouts."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[ParameterLayouts],
        redistributor: Redistributor,
        reduce_dtype: torch.dtype,
        region: CheckpointedRegion,
    ) -> None:
        self._parameters = tuple(parameters)
        self._redistributor = redistributor
        self._reduce_dtype = reduce_dtype
        self._region = region
        self._forward: Callable[..., Any] = module.forward
        # Signatures are looked up on forward, by the executor and by transformers.
        functools.update_wrapper(self, self._forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stored = [cast(DTensor, layouts.parameter) for layouts in self._parameters]
        copies: dict[DTensor, RecomputedCopy] = {}
        shown: dict[tuple[DTensor, Layout, Layout | None], Any] = {}
        try:
            for layouts, parameter in zip(self._parameters, stored, strict=True):
                key = parameter, layouts.compute, layouts.gradient  # a tied one is shown under several names
                if key not in shown:
                    shown[key] = run_function(
                        _ToComputeLayout, parameter, self._redistributor, layouts, self._reduce_dtype
                    )
                copy = layouts.owner._parameters[layouts.attribute] = shown[key]
                if layouts.compute != layouts.stored and not self._region:
                    copies[copy] = RecomputedCopy(self._redistributor.deferred(parameter, layouts.compute))
            with recompute_copies(copies):
                return self._forward(*args, **kwargs)
        finally:
            for layouts, parameter in zip(self._parameters, stored, strict=True):
                layouts.owner._parameters[layouts.attribute] = cast(nn.Parameter, parameter)


def attach_compute_layouts(
    by_owner: Mapping[nn.Module, Sequence[ParameterLayouts]],
    redistributor: Redistributor,
    reduce_dtype: torch.dtype,
    region: CheckpointedRegion,
) -> None:
    """Wrap the forward of each module that reads a parameter whose compute layout or gradient layout the plan sets.

    Args:
        by_owner: module -> layouts of its own parameters.
        redistributor: redistributes parameters and gradients on the mesh.
        reduce_dtype: dtype in which gradients are redistributed.
        region: true while a checkpointed block runs.
    """
    by_reader: dict[nn.Module, list[ParameterLayouts]] = {}
    for owned in by_owner.values():
        for layouts in owned:
            if layouts.redistributes:
                by_reader.setdefault(layouts.reader, []).append(layouts)
    for reader, read in by_reader.items():
        reader.forward = ComputeLayoutForward(reader, read, redistributor, reduce_dtype, region)


class _Cast(torch.autograd.Function):
    """Changes the dtype of the local tensor. The gradient keeps its layout, and gets the parameter's ``grad_dtype``."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, dtype: torch.dtype) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.grad_dtype = parameter.grad_dtype
        return _cast(parameter, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[DTensor | None, None]:
        if gradient is None or ctx.grad_dtype is None:
            return gradient, None
        return _cast(gradient, ctx.grad_dtype), None


def _cast(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    local = local_of(tensor).to(dtype)
    return make_dtensor(local, tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())


class _ToComputeLayout(torch.autograd.Function):
    """Redistributes a parameter to its compute layout, and its gradient to the layout of ``gradient_plan``, if any."""

    @staticmethod
    def forward(
        ctx: Any,
        parameter: DTensor,
        redistributor: Redistributor,
        layouts: ParameterLayouts,
        reduce_dtype: torch.dtype,
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.redistributor, ctx.gradient_layout, ctx.reduce_dtype = redistributor, layouts.gradient, reduce_dtype
        copy = redistributor.to_layout(parameter, layouts.compute)
        if copy is not parameter:
            return copy
        return make_dtensor(
            local_of(parameter), parameter.device_mesh, layouts.compute, parameter.shape, parameter.stride()
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        redistributor: Redistributor = ctx.redistributor
        result = redistributor.as_dtensor(gradient)
        if ctx.gradient_layout is not None:
            # Sums over ranks use the reduce dtype. Autograd needs the result in the dtype of the copy.
            reduced = redistributor.to_layout(_cast(result, ctx.reduce_dtype), ctx.gradient_layout)
            result = _cast(reduced, result.dtype)
        return result, None, None, None
