"""Module boundaries: hooks that take what enters and leaves a module to the layouts of the plan's ports."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from executor.resolve.fqns import module_fqns, parameter_names
from executor.resolve.tensor_paths import changed_arguments, changed_results
from executor.runtime.saved_tensor_recompute import save_no_copies
from executor.runtime.shared_redistributions import SharedRedistributions
from planner.errors import PlanTypeError, UnmatchedKeyError
from planner.plan.ports import ports_of, resolve_input_ports, resolve_output_ports
from planner.plan.sharding_plan import Port, ShardingPlan


def attach_boundaries(
    module: nn.Module, plan: ShardingPlan, shared: SharedRedistributions, *, opaque: Collection[nn.Module] = ()
) -> None:
    """Hook every module that ``input_plan`` or ``output_plan`` gives ports to. ``check_plan`` must have passed.

    ``opaque`` are the modules that Sharders made: no key was meant for what is inside them.
    """
    names = module_fqns(module, opaque=opaque)
    for fqn, spec in _once_each(module, resolve_input_ports(plan.input_plan, names)).items():
        submodule = module.get_submodule(fqn)
        names_of = tuple(parameter_names(submodule))
        entry = _Entry(fqn=fqn, ports=dict(ports_of(spec)), names=names_of, shared=shared)
        submodule.register_forward_pre_hook(entry, with_kwargs=True)
        if any(port.regather for port in entry.ports.values()):
            submodule.forward = RegatheringForward(submodule, shared)
    for fqn, spec in _once_each(module, resolve_output_ports(plan.output_plan, names)).items():
        leaving = _Exit(fqn=fqn, ports=dict(ports_of(spec)), shared=shared)
        module.get_submodule(fqn).register_forward_hook(leaving)


def _once_each(module: nn.Module, specs: Mapping[str, Any]) -> dict[str, Any]:
    # A module that is registered under two names must not be hooked twice.
    first: dict[nn.Module, str] = {}
    for fqn in specs:
        first.setdefault(module.get_submodule(fqn), fqn)
    return {fqn: specs[fqn] for fqn in first.values()}


def through_port(tensor: torch.Tensor, port: Port, shared: SharedRedistributions, *, local_piece: bool) -> DTensor:
    """Return ``tensor`` as it is behind ``port``.

    Args:
        tensor: a DTensor in any layout, or plain.
        port: layouts forward and backward.
        shared: redistributes.
        local_piece: whether a plain tensor is this rank's piece of ``port.layout``, or else the whole, replicated.
    """
    if not isinstance(tensor, DTensor) and local_piece:
        tensor = DTensor.from_local(tensor, shared.redistributor.device_mesh, port.layout, run_check=False)
    return shared.redistribute(tensor, port.layout, port.grad, port.source_grad, regather=port.regather)


class RegatheringForward:
    """A module's forward, whose backward has what it was called with redistributed again, where a port says so."""

    def __init__(self, module: nn.Module, shared: SharedRedistributions) -> None:
        self._forward: Callable[..., Any] = module.forward
        self._shared = shared
        # Signatures are looked up on forward, by us and by transformers.
        functools.update_wrapper(self, self._forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        leaves = pytree.tree_leaves((args, kwargs))
        with save_no_copies(self._shared.remade(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))):
            return self._forward(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A forward pre-hook; ``names`` are those of the arguments that may be passed by position."""

    fqn: str
    ports: Mapping[str, Port]
    names: tuple[str, ...]
    shared: SharedRedistributions

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return changed_arguments(self.ports, self.names, self._changed, args, kwargs)

    def _changed(self, leaf: Any, port: Port, name: str) -> Any:
        if leaf is None:
            # An optional argument that was not given.
            return None
        if not isinstance(leaf, torch.Tensor):
            raise _no_tensor("input_plan", self.fqn, name, leaf)
        # The planner knows which tensors inside the model are plain, and whole; what a user hands over is a piece.
        return through_port(leaf, port, self.shared, local_piece=self.fqn == "" or port.source is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exit:
    """A forward hook."""

    fqn: str
    ports: Mapping[str, Port]
    shared: SharedRedistributions

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        changed, met = changed_results(self.ports, self._changed, output)
        self._check_met(met)
        return changed

    def _changed(self, leaf: Any, port: Port, name: str) -> Any:
        if leaf is None:
            return None
        if not isinstance(leaf, torch.Tensor):
            raise _no_tensor("output_plan", self.fqn, name, leaf)
        return through_port(leaf, port, self.shared, local_piece=port.source is None)

    def _check_met(self, met: Collection[str]) -> None:
        # What a traced model returned it may leave out in another call (no loss without labels); a person mistypes.
        missed = sorted(name for name, port in self.ports.items() if name not in met and port.source is None)
        if missed:
            raise UnmatchedKeyError(
                f"output_plan names the results {missed} of {_text(self.fqn)}, which returned none of them.",
                field="output_plan",
                key=self.fqn,
                what_to_do="Name results by position (0, 1, ...) or by their key.",
            )


def _no_tensor(field: str, fqn: str, name: str, value: object) -> PlanTypeError:
    return PlanTypeError(
        f"{field} gives {name!r} of {_text(fqn)} a layout, but it is {type(value).__name__}, not a tensor.",
        field=field,
        key=fqn,
        what_to_do="Remove that layout, or write None in its place in a list.",
    )


def _text(fqn: str) -> str:
    return repr(fqn) if fqn else "the root"
