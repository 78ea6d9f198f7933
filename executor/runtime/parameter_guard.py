"""Guards of a sharded module's parameters: conversions, loaded values and replaced parameters run right or are refused.

torch converts a DTensor parameter (``module.to``, ``to_empty``) by giving the same object another implementation, on
which hooks are lost. A parameter that is registered anew has no hooks at all, and the sharded module would go on with
the old one. So a conversion to another dtype or device and a new parameter are errors at once; after the others hooks
are registered again. ``load_state_dict`` takes whole tensors, of which each rank keeps its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from executor.resolve.per_module import PerModule
from executor.runtime.grad_reduction import GradientReduction, is_attached
from planner.errors import PlanMismatchError

_guards: PerModule[ParameterGuard] = PerModule("guard")
"""Every module inside a sharded module -> its guard, for torch's hook on new parameters, which is global."""

Convert = Callable[[torch.Tensor], torch.Tensor]


class ParameterGuard:
    """Keeps the parameters of one sharded module those that the plan runs."""

    def __init__(self, root: nn.Module, reduction: GradientReduction, device_type: str, *, may_tie: bool) -> None:
        """Guard all modules in ``root``, after all of its parameters have been placed.

        Args:
            root: the sharded module.
            reduction: reduces the gradients of its parameters.
            device_type: device type of the mesh.
            may_tie: whether a parameter may become another one of a sharded module, in the same layout. A planned
                module computes with its parameters in layouts that hooks hold.
        """
        self._reduction = reduction
        self._device_type = device_type
        self._may_tie = may_tie
        self._is_converting = False
        self._names = {
            module: frozenset(name for name, p in module._parameters.items() if isinstance(p, DTensor))
            for module in root.modules()
        }
        for module in self._names:
            _guards[module] = self
            module.__dict__["_apply"] = _GuardedApply(self, module, module._apply)
            module.register_load_state_dict_pre_hook(self._before_load)
        root.register_forward_pre_hook(
            self._before_forward, prepend=True
        )  # before any hook that shows other parameters

    def convert(self, module: nn.Module, apply: Callable[..., nn.Module], fn: Convert, recurse: bool) -> nn.Module:
        """Return ``module`` converted by ``apply(fn, recurse)``, torch's ``Module._apply``.

        Raises:
            PlanMismatchError: ``fn`` changes the dtype or the device of a tensor; nothing has been changed.
        """
        if self._is_converting:
            return apply(fn, recurse)
        if not self._changes(module, fn, recurse):
            return module
        self._reduction.complete()
        self._is_converting = True
        try:
            return apply(fn, recurse)
        finally:
            self._is_converting = False
            self._reduction.hook_again()

    def check_registration(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Raise PlanMismatchError if ``parameter`` replaces one that the plan shards."""
        before = module._parameters.get(name)
        if parameter is before or name not in self._names[module] or self._is_converting:
            return
        if not (self._may_tie and parameter is not None and _is_tie(before, parameter)):
            raise _replaced(module, name)

    def _changes(self, module: nn.Module, fn: Convert, recurse: bool) -> bool:
        """Return whether ``fn`` gives any tensor new memory; raise PlanMismatchError if it gives a wrong one."""
        changes = False
        wrong: dict[str, str] = {}
        for device, dtype in {(tensor.device, tensor.dtype) for tensor in _tensors(module, recurse)}:
            probe = torch.empty(1, dtype=dtype, device=device)
            with torch.no_grad():
                converted = fn(probe)
            changes = changes or converted is not probe
            if converted.dtype != dtype:
                wrong[str(dtype)] = str(converted.dtype)
            is_materialized = device.type == "meta" and converted.device.type in (self._device_type, "meta")
            if converted.device != device and not is_materialized:
                wrong[str(device)] = str(converted.device)
        if wrong:
            listed = ", ".join(f"{before} to {after}" for before, after in sorted(wrong.items()))
            raise PlanMismatchError(
                f"This would convert a sharded module from {listed}, and its plan is for what it has now.",
                subject="module",
                expected=", ".join(sorted(wrong)),
                found=", ".join(sorted(set(wrong.values()))),
                what_to_do="Convert the module before shard_module, and plan with the dtype (`dtype`, `master_dtype`) "
                "and the devices that it is to have.",
            )
        return changes

    def _before_load(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *unused: Any,
    ) -> None:
        """Put this rank's shards of whole tensors into ``state_dict``, and copy where it would assign."""
        on_meta = [name for name, p in module.named_parameters() if p.is_meta and prefix + name in state_dict]
        if on_meta:
            raise PlanMismatchError(
                f"{len(on_meta)} parameters have no memory yet, {prefix + on_meta[0]!r} first: load_state_dict would "
                "load nothing into them.",
                subject="module",
                expected="parameters with memory",
                found="parameters on meta",
                what_to_do=f'Call to_empty(device="{self._device_type}") before, or load_weights instead.',
            )
        local_metadata["assign_to_params_buffers"] = False
        for name in self._names[module]:
            parameter, value = module._parameters[name], state_dict.get(prefix + name)
            if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
                continue
            if value.shape == parameter.shape:
                whole = value.detach().to(parameter.device, parameter.dtype).contiguous()
                mesh, layout = parameter.device_mesh, parameter.placements
                state_dict[prefix + name] = distribute_tensor(whole, mesh, layout, src_data_rank=None)

    def _before_forward(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        self._reduction.hook_again()
        for module, names in self._names.items():
            for name in names:
                if not isinstance(module._parameters.get(name), DTensor):
                    raise _replaced(module, name)


def _is_tie(before: nn.Parameter | None, parameter: nn.Parameter) -> bool:
    """Return whether ``parameter`` is one of a sharded module, in the layout that ``before`` has."""
    return (
        isinstance(before, DTensor)
        and isinstance(parameter, DTensor)
        and is_attached(parameter)
        and parameter.shape == before.shape
        and parameter.device_mesh == before.device_mesh
        and parameter.placements == before.placements
    )


class _GuardedApply:
    """``Module._apply`` of one module, guarded."""

    def __init__(self, guard: ParameterGuard, module: nn.Module, apply: Callable[..., nn.Module]) -> None:
        self._guard, self._module, self._apply = guard, module, apply

    def __call__(self, fn: Convert, recurse: bool = True) -> nn.Module:
        return self._guard.convert(self._module, self._apply, fn, recurse)


def _replaced(module: nn.Module, name: str) -> PlanMismatchError:
    return PlanMismatchError(
        f"{type(module).__name__}.{name} is sharded, and cannot be replaced or removed.",
        subject="module",
        expected="the parameters that shard_module has placed",
        found=f"another {name!r}, or none",
        what_to_do="Replace parameters before shard_module. To change values write into the parameter under "
        "torch.no_grad(), or call load_state_dict or load_weights.",
    )


def _tensors(module: nn.Module, recurse: bool) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    guard = _guards.get(module)
    if guard is not None:
        guard.check_registration(module, name, parameter)


register_module_parameter_registration_hook(_on_registration)
