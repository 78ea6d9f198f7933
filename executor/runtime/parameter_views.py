"""Parameters while the module runs: in their compute dtype for everybody, in their compute layout for their owner.

A parameter rests sharded and in its stored dtype. For the length of a forward, or of a recomputation, every module
sees it cast (``PresentedParameters``); while the owner's own forward runs, it has it gathered as well
(``MaterializedForward``). Backward, the gradient goes the other way without communication: it stays in the layout
that the op gave it, for instance partial, until ``grad_reduction`` reduces it once a step. Only where the plan's
``gradient_plan`` says so is it brought to a layout in every backward. Parameters that are gathered together are the
affair of ``executor.runtime.fully_sharded``, and none of this happens to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from executor.redistribute import Redistributor
from executor.resolve.parameter_uses import ParameterUse
from executor.runtime.saved_tensor_recompute import CheckpointedRegion, Remade, save_no_copies
from executor.torch_internals import local_of, make_dtensor, run_function

Copies = Mapping[nn.Parameter, DTensor]
"""Parameter -> itself in the compute dtype."""


class PresentedParameters:
    """Shows modules their parameters in the compute dtype, as a model that was built in it would."""

    def __init__(self, uses: Mapping[nn.Module, Sequence[ParameterUse]], dtype: torch.dtype) -> None:
        """Take the parameters that ``uses`` names and whose dtype is not ``dtype``; they are DTensors by now."""
        self._dtype = dtype
        self._slots: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for owner, owned in uses.items():
            slots = {use.name: cast(nn.Parameter, owner._parameters[use.name]) for use in owned}
            slots = {name: p for name, p in slots.items() if p.is_floating_point() and p.dtype != dtype}
            if slots:
                self._slots[owner] = slots
        self.copies: Copies = {}

    @contextmanager
    def presented(self) -> Iterator[None]:
        """Within it, a forward, modules have their parameters cast; gradients reach the parameters themselves."""
        parameters = dict.fromkeys(p for slots in self._slots.values() for p in slots.values())
        with self.presenting({p: run_function(_Cast, p, self._dtype) for p in parameters}, self._slots):
            yield

    def slots_below(self, block: nn.Module) -> dict[nn.Module, dict[str, nn.Parameter]]:
        """Return what is presented in ``block`` and its submodules."""
        return {module: self._slots[module] for module in block.modules() if module in self._slots}

    @contextmanager
    def presenting(self, copies: Copies, slots: Mapping[nn.Module, Mapping[str, nn.Parameter]]) -> Iterator[None]:
        """Within it the modules in ``slots`` have ``copies``: those of an earlier forward, to run part of it again."""
        before, self.copies = self.copies, copies
        try:
            for module, names in slots.items():
                for name, parameter in names.items():
                    # Past register_parameter, which takes nothing but leaves.
                    module._parameters[name] = cast(nn.Parameter, copies[parameter])
            yield
        finally:
            self.copies = before
            for module, names in slots.items():
                module._parameters.update(names)


class MaterializedForward:
    """A module's forward, for whose length some of the module's own parameters are in their compute layout."""

    def __init__(
        self,
        module: nn.Module,
        uses: Sequence[ParameterUse],
        redistributor: Redistributor,
        region: CheckpointedRegion,
    ) -> None:
        self._module = module
        self._region = region
        self._forward: Callable[..., Any] = module.forward
        self._uses = tuple(uses)
        self._redistributor = redistributor
        # Signatures are looked up on forward, by us and by transformers.
        functools.update_wrapper(self, self._forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slots = self._module._parameters
        before = {use.name: cast(DTensor, slots[use.name]) for use in self._uses}
        copies: dict[DTensor, Remade] = {}
        try:
            for use in self._uses:
                resting = before[use.name]
                copy = run_function(_Materialize, resting, self._redistributor, use)
                slots[use.name] = copy
                if use.compute != use.stored and not self._region:
                    copies[copy] = Remade(self._redistributor.again(resting, use.compute))
            with save_no_copies(copies):
                return self._forward(*args, **kwargs)
        finally:
            slots.update(cast(Mapping[str, nn.Parameter], before))


def materialize_parameters(
    uses: Mapping[nn.Module, Sequence[ParameterUse]], redistributor: Redistributor, region: CheckpointedRegion
) -> None:
    """Wrap the forward of every module that needs a parameter in another layout than it is stored in."""
    for module, owned in uses.items():
        needed = [use for use in owned if use.is_materialized]
        if needed:
            module.forward = MaterializedForward(module, needed, redistributor, region)


class _Cast(torch.autograd.Function):
    """Changes the dtype of the local piece; its gradient keeps its layout, and its dtype if the parameter takes any."""

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


class _Materialize(torch.autograd.Function):
    """Redistributes a parameter forward; the gradient is handed on as it comes, or in the layout that the use says."""

    @staticmethod
    def forward(ctx: Any, resting: DTensor, redistributor: Redistributor, use: ParameterUse) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.redistributor, ctx.use = redistributor, use
        copy = redistributor.to_layout(resting, use.compute)
        if copy is not resting:
            return copy
        return make_dtensor(local_of(resting), resting.device_mesh, use.compute, resting.shape, resting.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, None, None]:
        if gradient is None:
            return None, None, None
        redistributor: Redistributor = ctx.redistributor
        arrived = redistributor.as_dtensor(gradient)
        use: ParameterUse = ctx.use
        if use.gradient is None:
            return arrived, None, None
        # Sums over ranks are taken in the wider dtype; autograd wants the result in the copy's again.
        reduced = redistributor.to_layout(_cast(arrived, use.reduce_dtype), use.gradient)
        return _cast(reduced, arrived.dtype), None, None
